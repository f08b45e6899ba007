"""SIGTERM ends a process in one way, after everything has cleaned up."""

import signal
import subprocess
import sys

import pytest

from effort import PATIENCE_S

HEAD = """
import atexit, contextlib, os, signal, sys, threading
from moeless.core.signals import TERMINATED, ended_by_signal, signals_later, unwind_on_sigterm

@contextlib.contextmanager
def cleaned_up():
    try:
        yield
    finally:
        print("cleaned up")

def die():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

unwind_on_sigterm()
with ended_by_signal():
    atexit.register(print, "the end")
    with cleaned_up():
"""


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    script = HEAD + "".join(f"        {line}\n" for line in lines)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "lines",
    [
        ["die()"],
        ["sys.exit(TERMINATED)"],
        ["try: die()", "except Exception: print('swallowed')"],
        ["threading.Thread(target=print, args=('beside',)).start()", "die()"],
        ["with signals_later():", "    os.kill(os.getpid(), signal.SIGTERM)", "    print('done')"],
    ],
)
def test_it_cleans_up_lets_others_finish_and_dies_of_the_signal(lines):
    done = run(*lines)
    assert done.returncode == -signal.SIGTERM
    # Threads that print at the same time may mix their lines.
    assert done.stdout.rstrip().endswith("the end")
    assert "cleaned up" in done.stdout
    assert ("Thread" in lines[0]) == ("beside" in done.stdout), "threads end before"
    assert "swallowed" not in done.stdout
    assert ("signals_later" in lines[0]) == ("done" in done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize(("line", "code"), [("pass", 0), ("sys.exit(2)", 2), ("1 / 0", 1)])
def test_other_ends_are_as_they_were(line, code):
    assert run(line).returncode == code
