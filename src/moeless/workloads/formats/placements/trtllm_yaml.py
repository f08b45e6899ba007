"""TensorRT-LLM's placement, ``moe_load_balancer.yaml``.

``num_slots``; ``initial_global_assignments``, a map from absolute layer to the expert of each
slot, where successive slots belong to a rank, the same number to each; ``layer_updates_per_iter``,
0 for a static placement. Files of this shape are written and read without a YAML library; other
YAML is refused.

Source: NVIDIA/TensorRT-LLM, ``examples/wide_ep/ep_load_balancer/README.md``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from moeless.errors import ConfigError, TraceError
from moeless.workloads.formats.placements.placement import Placement, from_slot_rows, slot_rows

ASSIGNMENTS = "initial_global_assignments"

_NUMBERS = ("num_slots", "layer_updates_per_iter")


def format_trtllm_yaml(placement: Placement, *, layer_updates_per_iter: int = 0) -> str:
    """Write a placement as text.

    Args:
        placement: The same number of replicas on every device and layer.
        layer_updates_per_iter: Layers that the server may re-place per iteration.

    Raises:
        ConfigError: Uneven numbers of replicas, or a negative number of updates.
    """
    if layer_updates_per_iter < 0:
        raise ConfigError(f"layer_updates_per_iter {layer_updates_per_iter} is negative")
    rows = slot_rows(placement, system="TensorRT-LLM")
    lines = [f"{ASSIGNMENTS}:"]
    lines += [f"  {layer}: {row}" for layer, row in zip(placement.layer_ids, rows, strict=True)]
    lines += [f"num_slots: {len(rows[0])}", f"layer_updates_per_iter: {layer_updates_per_iter}"]
    return "\n".join(lines) + "\n"


def read_trtllm_yaml(path: Path, *, num_devices: int) -> Placement:
    """Read a placement file.

    Args:
        path: The file.
        num_devices: D (``ep_size``), which the file does not say.

    Raises:
        TraceError: Not such a file, no assignments in it, or ``num_slots`` contradicts them.
    """
    source = f"{path.name} (TensorRT-LLM)"
    try:
        text = path.read_text("utf8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not a text file") from error
    numbers: dict[str, int] = {}
    assignments: dict[int, list[int]] = {}
    for line, part in _parts(text):
        if match := re.fullmatch(r"(\w+):\s*(\d{1,9})", part):
            if match[1] not in _NUMBERS:
                raise TraceError(f"{source}: line {line}: unknown key {match[1]}")
            numbers[match[1]] = int(match[2])
        elif match := re.fullmatch(r"(\d{1,6}):\s*\[([\d,\s]*)\]", part):
            cells = [cell for cell in match[2].replace(",", " ").split() if cell]
            assignments[int(match[1])] = [int(cell) for cell in cells]
        elif part != f"{ASSIGNMENTS}:":
            raise TraceError(f"{source}: line {line}: cannot read {part[:40]!r}")
    if not assignments:
        raise TraceError(f"{source}: no {ASSIGNMENTS}; an online placement has none to start from")
    layer_ids = tuple(sorted(assignments))
    rows = [assignments[layer] for layer in layer_ids]
    slots = numbers.get("num_slots")
    if slots is not None and any(len(row) != slots for row in rows):
        raise TraceError(f"{source}: num_slots is {slots}, but a layer has another number")
    return from_slot_rows(rows, layer_ids, num_devices=num_devices, source=source)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Keys with their values, each on one line; lists may be wrapped or in block style."""
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        content = raw.partition("#")[0].strip()
        if not content or content == "---":
            continue
        if pending.endswith(":") and content.startswith("- "):
            pending += f" [{content[2:]}"
        elif "[" in pending and content.startswith("- "):
            pending += f", {content[2:]}"
        elif "[" in pending and "]" not in pending and ":" not in content:
            pending += f" {content}"
        else:
            if pending:
                yield start, _closed(pending)
            pending, start = content, number
    if pending:
        yield start, _closed(pending)


def _closed(part: str) -> str:
    return f"{part}]" if "[" in part and "]" not in part else part
