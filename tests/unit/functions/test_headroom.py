"""Whether there is room is asked, not tried out."""

import subprocess
import sys

import psutil
import pytest

from moeless.core.model import ExpertShape
from moeless.functions.host.headroom import invocation_bytes, require_room

LIMITED = """
import resource
import psutil
from moeless.functions.host.headroom import require_room
held = psutil.Process().memory_info().data
resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20), resource.RLIM_INFINITY))
for load_mb, headroom_mb in ((8, 32), (40, 8), (8, 72), (72, 8), (40, 40)):
    try:
        require_room(load_mb << 20, headroom_mb << 20)
        print("room")
    except MemoryError as error:
        print(error)
"""


def test_a_load_needs_room_for_itself_and_for_what_it_leaves():
    command = [sys.executable, "-c", LIMITED]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[:2] == ["room", "room"]
    assert lines[2].endswith("no 8,388,608 bytes more with 75,497,472 to spare")
    assert all("to spare" in line for line in lines[3:])


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 80])
def test_more_than_any_system_has_is_lack_of_memory(num_bytes):
    with pytest.raises(MemoryError, match="to spare"):
        require_room(num_bytes, 0)


def test_looking_takes_no_memory():
    before = psutil.Process().memory_info()
    require_room(1 << 30, 1 << 28)
    after = psutil.Process().memory_info()
    assert after.rss - before.rss < 1 << 20
    assert after.vms - before.vms < 1 << 28


def test_an_invocation_takes_more_with_more_rows_and_wider_experts():
    def shape(dtype, inner):
        return ExpertShape(hidden=8, intermediate=inner, dtype=dtype, activation="silu")

    # Input, output, gate and up, and three times their half, four bytes each, rows rounded up.
    assert invocation_bytes(shape("float32", 16), 8) == 8 * (2 * 8 + 5 * 16) * 4 * 9 // 8
    assert invocation_bytes(shape("bfloat16", 16), 16) == invocation_bytes(shape("float32", 16), 8)
