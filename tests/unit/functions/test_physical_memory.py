"""What budgets are held against: the machine's memory, or less where the system gives less."""

import os

import pytest

from moeless.errors import ConfigError
from moeless.functions.host import physical_memory
from moeless.functions.host.physical_memory import check_budget, usable_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MB = 1 << 20


def usable(tmp_path, own, limits):
    """With such control groups, by path of the file that holds a limit."""
    (tmp_path / "own").write_text(own)
    for path, limit in limits.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit)
    return usable_bytes(cgroups=tmp_path / "cgroup", own_cgroups=tmp_path / "own")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {"memory.max": f"{64 * MB}\n"}, 64 * MB),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{8 * MB}\n"}, 8 * MB),
        ("0::/a/b\n", {"a/b/memory.max": f"{4 * MB}\n", "a/memory.max": f"{8 * MB}\n"}, 4 * MB),
        # As a container sees itself that has no namespace of control groups.
        ("0::/docker/abc\n", {"memory.max": f"{8 * MB}\n"}, 8 * MB),
        (
            "5:cpu:/x\n4:hugetlb,memory:/x\n",
            {"memory/x/memory.limit_in_bytes": f"{2 * MB}\n"},
            2 * MB,
        ),
        # Version 1 says "no limit" with a huge number.
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
    ],
)
def test_the_smallest_limit_around_a_process_counts(tmp_path, own, limits, expected):
    assert usable(tmp_path, own, limits) == expected


def test_a_system_without_control_groups_has_all_its_memory(tmp_path):
    assert usable_bytes(cgroups=tmp_path / "none", own_cgroups=tmp_path / "none") == MACHINE


def test_a_budget_beyond_it_is_refused_for_a_cpu(monkeypatch):
    monkeypatch.setattr(physical_memory, "usable_bytes", lambda: 8 * MB)
    check_budget(8 * MB, kind="cpu", option="--device-memory")
    check_budget(9 * MB, kind="cuda", option="--device-memory")
    with pytest.raises(ConfigError, match=r"--device-memory of 9,437,184 .* the 8,388,608 bytes"):
        check_budget(9 * MB, kind="cpu", option="--device-memory")
