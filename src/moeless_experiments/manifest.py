"""What a result depends on, written beside it: commit, seed, versions, machine, every setting."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Result

_PACKAGES = ("moeless", "numpy", "torch", "transformers", "matplotlib", "scipy", "numba")


def describe(
    experiment: Experiment, result: Result, context: Context, *, took_s: float
) -> dict[str, Any]:
    """Everything about a result but its data, for JSON.

    Args:
        experiment: What was run.
        result: What came out.
        context: How it was run.
        took_s: How long it took.
    """
    return {
        "experiment": experiment.id,
        "title": experiment.title,
        "claim": experiment.claim,
        "provenance": result.provenance,
        "findings": [
            {
                "what": each.what,
                "paper": each.paper,
                "ours": each.ours,
                "why": each.why,
                "verdict": each.verdict,
                "cases": dict(each.cases),
            }
            for each in result.findings
        ],
        "interpretation": result.interpretation,
        "tables": [
            {
                "file": f"{table.name}.csv",
                "rows": len(table.rows),
                "provenance": table.provenance or result.provenance,
            }
            for table in result.tables
        ],
        "plots": [
            {
                "file": f"{plot.name}.png",
                "vector": f"{plot.name}.svg" if plot.vector else None,
                "caption": plot.caption,
            }
            for plot in result.plots
        ],
        "quick": context.quick,
        "seed": context.seed,
        "threads": context.threads,
        "processes": context.processes,
        "config": dict(result.config),
        "commit": find_commit(Path(__file__)),
        "versions": find_versions(),
        "device": describe_machine(),
        "took_s": round(took_s, 1),
    }


def find_commit(source: Path) -> str | None:
    """The commit that a source file is at, ``+`` behind it if files below were changed.

    Args:
        source: A file of this package.

    Returns:
        None where there is no git, or the file is not under it: an installed package may lie
        inside another project's repository.
    """
    folder = source.parent
    if _git(folder, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "..")
    return f"{commit}+" if commit and changed else commit


def find_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_machine() -> str:
    """The processor and how many of its cores may be used."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # only Linux has it
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(  # noqa: S603 - constant arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the user's own git
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
