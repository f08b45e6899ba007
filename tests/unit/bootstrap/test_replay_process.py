"""What a replaying process says on its standard output."""

import subprocess
import sys

NOISY = """
import os, sys
from moeless.bootstrap.replays.replay_process import take_output
messages = take_output()
os.write(1, b"a solver written in C\\n")
print("a library")
messages.write("a message\\n")
messages.flush()
"""


def test_what_libraries_print_is_not_taken_for_a_message():
    done = subprocess.run(
        [sys.executable, "-c", NOISY], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "a message\n"
    assert "a solver written in C" in done.stderr
    assert "a library" in done.stderr
