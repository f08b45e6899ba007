"""The first line of a result file: how its numbers came about."""

import shlex
import subprocess
import sys
from pathlib import Path


def provenance(kind: str) -> str:
    """One comment line: what kind of numbers these are, the command, and the commit.

    Args:
        kind: For example ``simulated``.
    """
    program = Path(sys.argv[0])
    command = shlex.join(["python", f"benchmarks/{program.name}", *map(_short, sys.argv[1:])])
    return f"# {kind}; command: {command}; commit: {_commit()}"


def _short(argument: str) -> str:
    """Paths of this machine mean nothing elsewhere: only the names of files and folders."""
    return Path(argument).name if argument.startswith("/") else argument


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".")
        return git("rev-parse", "--short=12", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
