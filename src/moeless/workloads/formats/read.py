"""Reads recorded loads of any known format, and refuses those that would mislead."""

from collections.abc import Mapping
from pathlib import Path

from moeless.errors import ConfigError, TraceError, os_reason
from moeless.workloads.formats.arrays import as_array, holds_ids, loads_of_array, read_npy
from moeless.workloads.formats.checks import refuse_other_model, refuse_partial, refuse_repeats
from moeless.workloads.formats.csv_table import read_csv_loads
from moeless.workloads.formats.detect import FORMATS, detect_format, require_content
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads
from moeless.workloads.formats.sglang import TorchLoader, loads_of_dump, read_document
from moeless.workloads.formats.trace_npz import read_trace_loads
from moeless.workloads.formats.trtllm import read_trtllm_loads
from moeless.workloads.formats.vllm import NAMES, count_ids, read_vllm_loads
from moeless.workloads.formats.vllm_stats import read_vllm_stats
from moeless.workloads.input_file import as_file


def read_loads(
    path: Path,
    *,
    load_torch: TorchLoader,
    format_name: str | None = None,
    declared: Declared | None = None,
    allow_partial: bool = False,
) -> ExpertLoads:
    """Read recorded loads.

    Args:
        path: A file, or a directory of TensorRT-LLM statistics.
        load_torch: Opens ``.pt`` files.
        format_name: One of ``FORMATS``; None tells it from the content.
        declared: What is known of the model; the file is held against it.
        allow_partial: Accept that only one rank's share of the experts has tokens.

    Raises:
        ConfigError: No format has that name.
        TraceError: The file cannot be read, or must not be planned from; the message says why.
    """
    if format_name is not None and format_name not in FORMATS:
        raise ConfigError(f"unknown format {format_name!r}; known are: {', '.join(FORMATS)}")
    declared = declared or Declared()
    with as_file(path) as file:
        require_content(file)
        name = format_name or detect_format(file, num_experts=declared.num_experts)
        if file.is_dir() != (name == "trtllm"):
            raise TraceError(
                f"{file}: format {name} is {'a directory' if name == 'trtllm' else 'a file'}"
            )
        try:
            loads = _read(file, name, load_torch, declared, chosen=format_name is not None)
        except OSError as error:
            raise TraceError(f"{file}: cannot be read ({os_reason(error)})") from error
    refuse_other_model(loads, declared)
    refuse_repeats(loads)
    if not allow_partial:
        refuse_partial(loads.loads_LE, source=loads.source)
    return loads


def _read(
    path: Path, name: str, load_torch: TorchLoader, declared: Declared, *, chosen: bool
) -> ExpertLoads:
    if name == "sglang" or (name in ("array", "moe-infinity") and not _is_npy(path)):
        data = read_document(path, load_torch=load_torch)
        if isinstance(data, Mapping) or (chosen and name == "sglang"):
            return loads_of_dump(data, name=path.name)
        array = as_array(data, source=path.name)
        if not chosen and holds_ids(array, declared.num_experts):
            return count_ids({NAMES[0]: array}, declared, name=path.name)
        return loads_of_array(array, declared, name=path.name)
    if name in ("array", "moe-infinity"):
        return loads_of_array(read_npy(path), declared, name=path.name, format_name=name)
    if name == "vllm":
        return read_vllm_loads(path, declared)
    if name == "csv":
        return read_csv_loads(path, declared)
    readers = {
        "trace": read_trace_loads,
        "trtllm": read_trtllm_loads,
        "vllm-stats": read_vllm_stats,
    }
    return readers[name](path)


def _is_npy(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(6) == b"\x93NUMPY"
