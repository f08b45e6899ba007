"""What each part may load: most of MoEless runs without torch, and layers hold."""

import importlib.util
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import moeless

HEAVY = ("torch", "transformers", "safetensors", "tokenizers")

_WITHOUT_HEAVY = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def run_python(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def modules_of(package_name):
    """A package and all modules below it; the package itself may be imported to find them."""
    package = importlib.import_module(package_name)
    below = pkgutil.walk_packages(package.__path__, f"{package_name}.")
    return [package_name, *(info.name for info in below)]


def test_importing_moeless_loads_neither_torch_nor_an_engine():
    result = run_python(
        f"import sys, moeless; print(sorted(set({HEAVY!r}) & set(sys.modules)), "
        "[m for m in sys.modules if m.startswith('moeless.')])"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(
    "package", ["core", "policies", "costs", "workloads", "simulator", "telemetry", "control"]
)
def test_every_module_of_a_pure_package_imports_without_torch(package):
    modules = modules_of(f"moeless.{package}")
    assert len(modules) > 1
    result = run_python(_WITHOUT_HEAVY, *modules)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "modules",
    [
        ("moeless.errors", "moeless.config"),
        *(
            tuple(modules_of(f"moeless.functions.{package}"))
            for package in ("platform", "planning", "pool", "sharing", "accounts", "supervisor")
        ),
        ("moeless.functions.links.channel", "moeless.functions.links.board"),
        ("moeless.bootstrap.serving.supervisor_process",),
        ("moeless.cli.main",),
    ],
    ids=lambda modules: modules[0],
)
def test_what_must_start_fast_imports_without_torch(modules):
    result = run_python(_WITHOUT_HEAVY, *modules)
    assert result.returncode == 0, result.stderr


def test_the_block_on_torch_bites():
    """Or the tests above would prove nothing."""
    result = run_python(_WITHOUT_HEAVY, "moeless.functions.host.host")
    assert result.returncode != 0
    assert "torch is blocked" in result.stderr


def test_layers_hold():
    root = Path(__file__).resolve().parents[2]
    command = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    if command is None:
        pytest.skip("import-linter is not installed; install the extra dev")
    if importlib.util.find_spec("moeless").submodule_search_locations != [
        str(root / "src" / "moeless")
    ]:
        pytest.skip(f"moeless is installed from {moeless.__file__}, not from this checkout")
    result = subprocess.run(
        [command, "--no-cache"], cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
