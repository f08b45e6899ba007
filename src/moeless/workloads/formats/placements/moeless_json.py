"""MoEless' own placement format, JSON version 1.

``{"format": "moeless-placement", "version": 1, "num_experts": E, "num_devices": D, "layers":
[{"layer": 3, "devices": [[experts on device 0], ...]}, ...], "report": {...}}``. Devices may hold
different numbers of experts. ``report`` is free, for readers of figures; nothing is read from it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeless.errors import TraceError
from moeless.workloads.formats.placements.placement import Placement, is_id_rows
from moeless.workloads.formats.sglang import read_json

NAME = "moeless-placement"
VERSION = 1


def format_placement(placement: Placement, *, report: Mapping[str, Any] | None = None) -> str:
    """Write a placement as text.

    Args:
        placement: The placement.
        report: Figures to go with it.
    """
    devices = range(placement.num_devices)
    data: dict[str, Any] = {
        "format": NAME,
        "version": VERSION,
        "num_experts": placement.num_experts,
        "num_devices": placement.num_devices,
    }
    layers = [
        {"layer": layer, "devices": [placement.experts_on(row, device) for device in devices]}
        for row, layer in enumerate(placement.layer_ids)
    ]
    head = json.dumps(data)[:-1]
    rows = ",\n  ".join(json.dumps(layer) for layer in layers)
    tail = f', "report": {json.dumps(report)}' if report is not None else ""
    return f'{head}, "layers": [\n  {rows}\n]{tail}}}\n'


def read_placement(path: Path) -> Placement:
    """Read a placement file.

    Raises:
        TraceError: Not such a file, of another version, or damaged.
    """
    data = read_json(path)
    return parse_placement(data, source=path.name)


def parse_placement(data: Any, *, source: str) -> Placement:
    """Read a placement from decoded JSON.

    Args:
        data: The decoded file.
        source: The file, for messages.

    Raises:
        TraceError: Not such a file, of another version, or damaged.
    """
    if not isinstance(data, Mapping) or data.get("format") != NAME:
        raise TraceError(f"{source}: not a {NAME} file")
    if data.get("version") != VERSION:
        raise TraceError(
            f"{source}: version {data.get('version')!r}; this release reads version {VERSION}"
        )
    experts = _positive(data, "num_experts", source)
    devices = _positive(data, "num_devices", source)
    layers = data.get("layers")
    if not isinstance(layers, list) or not layers:
        raise TraceError(f"{source}: layers is {type(layers).__name__}, expected a list of layers")
    replicas_LED = np.zeros((len(layers), experts, devices), dtype=np.uint8)
    ids = []
    for row, entry in enumerate(layers):
        held = entry.get("devices") if isinstance(entry, Mapping) else None
        if not is_id_rows(held) or len(held) != devices:
            raise TraceError(f"{source}: layers[{row}].devices is not {devices} lists of experts")
        ids.append(_layer(entry, row, source))
        for device, on_device in enumerate(held):
            if any(not 0 <= expert < experts for expert in on_device):
                raise TraceError(
                    f"{source}: layers[{row}], device {device}: {on_device} is not within "
                    f"experts 0 to {experts - 1}"
                )
            replicas_LED[row, on_device, device] = 1
    if ids != sorted(set(ids)):
        raise TraceError(f"{source}: layers are not in ascending order")
    return Placement(layer_ids=tuple(ids), replicas_LED=replicas_LED)


def _positive(data: Mapping[str, Any], key: str, source: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65536:
        raise TraceError(f"{source}: {key} is {value!r}, expected a positive number")
    return value


def _layer(entry: Mapping[str, Any], row: int, source: str) -> int:
    layer = entry.get("layer")
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise TraceError(f"{source}: layers[{row}].layer is {layer!r}, expected a layer id")
    return layer
