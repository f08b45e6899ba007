"""Which invoker fits a machine, where an operator leaves that to us (``--invoker auto``).

Measured by ``benchmarks/bench_serving.py``. Must not know an engine; imports nothing heavy.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeless.config import InvokerName
from moeless.core.cluster import Device

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, kw_only=True)
class InvokerChoice:
    """An invoker, and why.

    Args:
        name: Of the invoker.
        reason: Half a sentence for an operator.
    """

    name: InvokerName
    reason: str


def choose_invoker(
    devices: Sequence[Device] | None, *, memory_nodes: int, needs_workers: str | None
) -> InvokerChoice:
    """The fastest invoker that can do what was asked for.

    Args:
        devices: The device pool, not empty; None where nobody asked for any.
        memory_nodes: Of those that the cores which we may use belong to, at least 1.
        needs_workers: An option that was given and means something for worker processes only.
    """
    if needs_workers is not None:
        return InvokerChoice(name="process", reason=f"{needs_workers} is for worker processes")
    if devices is not None and len(devices) == 1:
        return InvokerChoice(name="inline", reason="one device needs no process of its own")
    if devices is not None and any(device.kind == "cuda" for device in devices):
        reason = "GPUs compute at the same time where each has a process"
        return InvokerChoice(name="process", reason=reason)
    if memory_nodes > 1:
        reason = f"cores of {memory_nodes} memory nodes: a process stays beside its memory"
        return InvokerChoice(name="process", reason=reason)
    if devices is None:
        reason = "cores that share one memory are one device, fastest with all threads"
        return InvokerChoice(name="inline", reason=reason)
    reason = (
        "devices are cores that share one memory: one after another, each with all threads, "
        "they are faster than processes that have to be woken; --invoker process takes those"
    )
    return InvokerChoice(name="inline", reason=reason)


def count_memory_nodes(cores: Iterable[int] | None = None, *, nodes: Path = _NODES) -> int:
    """Memory (NUMA) nodes that cores belong to; 1 where the system does not say.

    Args:
        cores: By number; None for those that this process may use.
        nodes: Where the system lists nodes, each with its ``cpulist``.
    """
    ours = set(os.sched_getaffinity(0) if cores is None else cores)
    found = 0
    for path in nodes.glob("node[0-9]*/cpulist"):
        try:
            theirs = _parse_cpulist(path.read_text())
        except (OSError, ValueError):
            continue
        found += bool(ours & theirs)
    return max(1, found)


def _parse_cpulist(text: str) -> set[int]:
    """Core numbers of a list such as ``0-3,8``, which may be empty."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
