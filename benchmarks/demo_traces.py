"""Routing traces of the demo models, made where they are missing.

What ``moeless demo-model build`` and ``moeless record`` do with these options; some ten minutes of
two cores for each number of experts. Chatbot-Arena style prompts, greedy answers of up to 128
tokens, 16 requests at a time: chunks of prefill up to 512 tokens between decode steps.
"""

import json
import subprocess
import sys
from pathlib import Path

PROMPTS = 200


def demo_trace(experts: int, directory: Path) -> Path:
    """The trace of the demo model with so many experts.

    Args:
        experts: 8, 16 or 32.
        directory: Where traces are kept.
    """
    path = directory / f"demo{experts}_arena.npz"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        built = _moeless("demo-model", "build", "--experts", str(experts), "--json", read=True)
        _moeless(
            *("record", json.loads(built)["path"], "--prompts", "arena"),
            *("--limit", str(PROMPTS), "--seed", "0", "--out", str(path)),
        )
    return path


def _moeless(*arguments: str, read: bool = False) -> str:
    print("$ moeless", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "moeless", *arguments],
        stdout=subprocess.PIPE if read else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"moeless {arguments[0]} ended with {done.returncode}")
    return done.stdout or ""
