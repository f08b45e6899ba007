"""Tells the format of recorded loads from the content of the file, not from its name."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.npy_file import read_npy
from moeless.workloads.formats.trtllm import META
from moeless.workloads.formats.vllm import NAMES as VLLM_NAMES

FORMATS = ("trace", "sglang", "trtllm", "vllm", "moe-infinity", "csv")
"""Names of the formats that loads can be read from."""

_TORCH_MEMBER = "data.pkl"


def detect_format(path: Path) -> str:
    """Name the format of a file or directory.

    Args:
        path: The file or directory.

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
        return _detect_array(read_npy(path))
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return "sglang"
    if b"\x00" in head:
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
        reason = error.strerror if isinstance(error, OSError) else error
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
    raise _unknown(path)


def _detect_array(array: NDArray[np.generic]) -> str:
    """Ids of a token differ from each other; counts of a layer hardly ever do."""
    if array.ndim != 3 or array.dtype.kind == "f" or array.size == 0:
        return "moe-infinity"
    if array.dtype == np.int16:
        return "vllm"
    sample = np.sort(array[:64].reshape(-1, array.shape[2]), axis=1)
    distinct = (sample[:, 1:] != sample[:, :-1]).all(axis=1).mean()
    return "vllm" if distinct > 0.5 else "moe-infinity"


def _unknown(path: Path) -> TraceError:
    return TraceError(
        f"{path}: no known format of expert loads; known are {', '.join(FORMATS)} (choose with "
        f"--format)"
    )
