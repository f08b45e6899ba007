"""Tells the format of recorded loads from the content of the file, not from its name."""

import zipfile
from pathlib import Path

from moeless.errors import TraceError, os_reason
from moeless.workloads.formats.arrays import holds_ids, read_npy
from moeless.workloads.formats.trtllm import META
from moeless.workloads.formats.vllm import NAMES as VLLM_NAMES
from moeless.workloads.formats.vllm_stats import begins_with_record

FORMATS = ("trace", "sglang", "trtllm", "vllm", "vllm-stats", "moe-infinity", "array", "csv")
"""Names of the formats that loads can be read from."""

_BEFORE_TEXT = b"\xef\xbb\xbf\xff\xfe \t\r\n"
_TORCH_MEMBER = "data.pkl"


def detect_format(path: Path, *, num_experts: int | None = None) -> str:
    """Name the format of a file or directory.

    Args:
        path: The file or directory.
        num_experts: E, where it is known; it helps to tell counts from ids.

    Returns:
        One of ``FORMATS``.

    Raises:
        TraceError: Missing, empty, a pickle, or of no known format.
    """
    require_content(path)
    if path.is_dir():
        if (path / META).is_file():
            return "trtllm"
        raise TraceError(
            f"{path}: a directory without {META}; name a file, or a directory of TensorRT-LLM "
            f"statistics"
        )
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"PK\x03\x04"):
        return _detect_archive(path)
    if head.startswith(b"\x93NUMPY"):
        array = read_npy(path)
        if holds_ids(array, num_experts):
            return "vllm"
        return "moe-infinity" if array.ndim == 3 else "array"
    utf16 = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if head.replace(b"\x00", b"").lstrip(_BEFORE_TEXT).startswith((b"{", b"[")):
        return "vllm-stats" if begins_with_record(path) else "sglang"
    if b"\x00" in head and not utf16:
        raise _unknown(path)
    return "csv"


def require_content(path: Path) -> None:
    """Refuse what cannot be read, whatever its format.

    Args:
        path: The file or directory.

    Raises:
        TraceError: Missing, unreadable, empty, or a pickle.
    """
    try:
        if path.is_dir():
            return
        if not path.is_file():
            state = "is not a regular file" if path.exists() else "no such file"
            raise TraceError(f"{path}: {state}; name a file of recorded loads")
        with path.open("rb") as file:
            head = file.read(2)
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else error
        raise TraceError(f"{path}: cannot be read ({reason})") from error
    if not head:
        raise TraceError(f"{path}: the file is empty; record again")
    if head[0] == 0x80 and len(head) > 1 and head[1] <= 5:
        raise TraceError(
            f"{path}: a pickle, which can run code when it is read; save it as .npy, JSON or CSV "
            f"(a legacy .pt: save it again with a current torch)"
        )


def _detect_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise TraceError(f"{path}: damaged archive ({error}); copy it again") from error
    if any(name.rpartition("/")[2] == _TORCH_MEMBER for name in names):
        return "sglang"
    if any(f"{name}.npy" in names for name in VLLM_NAMES):
        return "vllm"
    if "loads.npy" in names or "meta.npy" in names:
        return "trace"
    if "xl/workbook.xml" in names:
        raise TraceError(f"{path}: an Excel workbook; save its sheet as CSV")
    raise _unknown(path)


def _unknown(path: Path) -> TraceError:
    return TraceError(
        f"{path}: no known format of expert loads; known are {', '.join(FORMATS)} (choose with "
        f"--format)"
    )
