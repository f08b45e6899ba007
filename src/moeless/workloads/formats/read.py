"""Reads recorded loads of any known format, and refuses those that would mislead."""

from pathlib import Path

from moeless.errors import ConfigError, TraceError
from moeless.workloads.formats.checks import refuse_other_model, refuse_partial, refuse_repeats
from moeless.workloads.formats.csv_table import read_csv_loads
from moeless.workloads.formats.detect import FORMATS, detect_format, require_content
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads
from moeless.workloads.formats.moe_infinity import read_moe_infinity_loads
from moeless.workloads.formats.sglang import TorchLoader, read_sglang_loads
from moeless.workloads.formats.trace_npz import read_trace_loads
from moeless.workloads.formats.trtllm import read_trtllm_loads
from moeless.workloads.formats.vllm import read_vllm_loads


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
    require_content(path)
    declared = declared or Declared()
    name = format_name or detect_format(path)
    if path.is_dir() != (name == "trtllm"):
        raise TraceError(
            f"{path}: format {name} is {'a directory' if name == 'trtllm' else 'a file'}"
        )
    try:
        loads = _read(path, name, load_torch, declared)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    refuse_other_model(loads, declared)
    refuse_repeats(loads)
    if not allow_partial:
        refuse_partial(loads.loads_LE, source=loads.source)
    return loads


def _read(path: Path, name: str, load_torch: TorchLoader, declared: Declared) -> ExpertLoads:
    if name == "sglang":
        return read_sglang_loads(path, load_torch=load_torch)
    if name == "vllm":
        return read_vllm_loads(path, declared)
    readers = {
        "trace": read_trace_loads,
        "trtllm": read_trtllm_loads,
        "moe-infinity": read_moe_infinity_loads,
        "csv": read_csv_loads,
    }
    return readers[name](path)
