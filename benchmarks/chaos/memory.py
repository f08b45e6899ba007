"""What a server's processes hold, by kind of memory, experts counted apart.

Proportional sizes (PSS) count a page that several processes share once in all: resident sizes
would count the shared rows once for each process. Pages of files (torch's library) are shown but
not judged: the system takes them away when it needs memory, and their share depends on who else on
the machine has the same files open.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from pathlib import Path

import httpx

from chaos.server import Server

KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}


def take_sample(server: Server) -> dict[str, dict[str, int]]:
    """Bytes by role and kind; ``count`` is how many processes have the role.

    Workers come and go: one that ends while it is looked at counts as not there.
    """
    sample: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pid, role in server.roles().items():
        with contextlib.suppress(OSError):
            held = _read_sizes(pid)
            sample[role]["count"] += 1
            for kind, num_bytes in held.items():
                sample[role][kind] += num_bytes
    return {role: dict(sizes) for role, sizes in sample.items()}


def _read_sizes(pid: int) -> dict[str, int]:
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, number, *_ = line.split()
        if name[:-1] in KINDS:
            sizes[KINDS[name[:-1]]] = int(number) * 1024
    return sizes


def resident_expert_bytes(server: Server) -> int:
    """What experts hold on all devices, by the server's own count."""
    text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith("moeless_device_memory_bytes") and 'state="resident"' in line
    )


def take_stock(server: Server, *, samples: int = 5, pause_s: float = 0.3) -> dict:
    """What a quiet server holds: the median of some samples, and experts' part of it."""
    taken = []
    for _ in range(samples):
        taken.append(take_sample(server))
        time.sleep(pause_s)
    roles = {
        role: {
            kind: int(statistics.median(s.get(role, {}).get(kind, 0) for s in taken))
            for kind in ("count", *KINDS.values())
        }
        for role in sorted({role for s in taken for role in s})
    }
    held = sum(sizes["anonymous"] + sizes["shared"] for sizes in roles.values())
    experts = resident_expert_bytes(server)
    return {
        "held_bytes": held,
        "expert_bytes": experts,
        "other_bytes": held - experts,
        "file_bytes": sum(sizes["file"] for sizes in roles.values()),
        "roles": roles,
    }
