"""Generated documentation agrees with what it is generated from."""

import subprocess
import sys
from pathlib import Path

from effort import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_the_generated_pages_are_what_would_be_generated_now():
    # In a process of its own: click remembers in a command how its help was first asked for.
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_page_that_the_readme_links_to_exists():
    text = (ROOT / "README.md").read_text("utf8")
    targets = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    local = [target for target in targets if target and "://" not in target]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []
