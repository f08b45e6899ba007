"""Reads a placement of any known format."""

from pathlib import Path

from moeless.errors import TraceError
from moeless.workloads.formats.detect import require_content
from moeless.workloads.formats.placements.moeless_json import NAME, parse_placement
from moeless.workloads.formats.placements.placement import Placement
from moeless.workloads.formats.placements.sglang_map import KEY, parse_sglang_map
from moeless.workloads.formats.placements.trtllm_yaml import read_trtllm_yaml
from moeless.workloads.formats.sglang import read_json
from moeless.workloads.input_file import as_file


def read_any_placement(path: Path, *, num_devices: int) -> Placement:
    """Read a placement, telling its format from the content.

    Args:
        path: A JSON file of MoEless or SGLang, or TensorRT-LLM's YAML.
        num_devices: D; formats that do not say it are read for this many.

    Raises:
        TraceError: Missing, of no known format, damaged, or for another number of devices.
    """
    with as_file(path) as file:
        return _read(file, num_devices)


def _read(path: Path, num_devices: int) -> Placement:
    require_content(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a directory; name a placement file")
    if path.read_bytes().lstrip()[:1] != b"{":
        return read_trtllm_yaml(path, num_devices=num_devices)
    data = read_json(path)
    if isinstance(data, dict) and KEY in data:
        return parse_sglang_map(data, num_devices=num_devices, source=path.name)
    if isinstance(data, dict) and data.get("format") == NAME:
        placement = parse_placement(data, source=path.name)
        if placement.num_devices != num_devices:
            raise TraceError(
                f"{path.name}: a placement on {placement.num_devices} devices, but --devices is "
                f"{num_devices}"
            )
        return placement
    raise TraceError(f"{path.name}: no placement; expected {NAME} or {KEY}")
