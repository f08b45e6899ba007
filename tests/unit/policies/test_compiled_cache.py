"""Where compiled loops are kept: where numba can, else in a private folder, else nowhere."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
from moeless.policies.kernels.compiled import compiled

@compiled("int64(int64)")
def twice(number):
    return 2 * number

assert twice(21) == 42
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()))
"""


@pytest.fixture
def module(tmp_path):
    """A module beside which nothing can be written, nor in the home of whoever runs it."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "loops.py").write_text(SOURCE)
    (folder / "__pycache__").write_text("in the way, even for root")
    (tmp_path / "temporary").mkdir(mode=0o700)
    return folder / "loops.py"


def run(module, **environment):
    folder = module.parent.parent
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMBA_", "XDG_")) and name != "HOME"
    }
    done = subprocess.run(
        [sys.executable, str(module)],
        env=inherited
        | {"HOME": "/proc/nowhere", "TMPDIR": str(folder / "temporary"), "IPYTHONDIR": "/proc/no"}
        | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(int(count) for count in done.stdout.split()), done.stderr


def test_code_is_kept_in_a_private_folder_where_it_cannot_be_kept_elsewhere(module):
    assert run(module) == ((0, 1), "")
    (folder,) = (module.parent.parent / "temporary").iterdir()
    assert folder.name == f"moeless-compiled-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert run(module) == ((1, 0), "")


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_folder_that_somebody_else_may_have_filled_is_not_used_and_that_is_said(module, trap):
    temporary = module.parent.parent / "temporary"
    folder = temporary / f"moeless-compiled-{os.getuid()}"
    if trap == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif trap == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    else:
        folder.touch()
    counts, said = run(module)
    assert counts == (0, 1)
    assert said.count("compiled loops cannot be kept anywhere") == 1
    assert "NUMBA_CACHE_DIR" in said
    assert not list(Path(temporary).rglob("*.nbi"))


def test_a_folder_that_an_operator_chose_in_vain_is_not_replaced(module):
    counts, said = run(module, NUMBA_CACHE_DIR="/proc/nowhere")
    assert counts == (0, 1)
    assert "NUMBA_CACHE_DIR" in said
