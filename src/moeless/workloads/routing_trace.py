"""Routing traces: how many tokens each logical expert of each layer received, entry by entry.

A trace is one ``.npz`` file, format version 1. This module must not know how traces are made or
replayed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless.core.whole_file import written_whole
from moeless.errors import TraceError, os_reason
from moeless.workloads.npz_archive import read_arrays
from moeless.workloads.trace_checks import (
    check_array,
    check_loads,
    check_not_negative,
    check_times,
    check_topk_ids,
)
from moeless.workloads.trace_meta import TraceMeta, parse_meta

__all__ = ["FORMAT_VERSION", "RoutingTrace", "TraceMeta", "read_trace", "write_trace"]

FORMAT_VERSION: Final = 1

_REQUIRED: Final = ("version", "meta", "loads", "tokens")
_OPTIONAL: Final = {
    "time_s": "time_s_N",
    "decode_tokens": "decode_tokens_N",
    "topk_ids": "topk_ids_TLK",
    "topk_offsets": "topk_offsets",
    "group": "group_N",
    "predicted": "predicted_NLE",
}
"""Name in the file to field."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Expert loads of N entries (steps or requests), L MoE layers, E logical experts.

    Args:
        meta: Shape and origin.
        loads_NLE: Tokens routed to each logical expert, unsigned integers of any width [N, L, E].
        tokens_N: Tokens of each entry, int32 [N]; every loads[n, l] sums to tokens[n] x top_k.
        time_s_N: When each step began, in seconds, ascending, float64 [N]; steps only.
        decode_tokens_N: How many of the tokens were decoded (the others were prompt tokens),
            int32 [N].
        topk_ids_TLK: The experts that each of the T tokens was sent to, int16 [T, L, K].
        topk_offsets: The tokens of entry n are topk_offsets[n]:topk_offsets[n + 1], int64 [N + 1].
        group_N: A label of each entry, unicode [N].
        predicted_NLE: Loads that a predictor expected, float32 [N, L, E]; see ``meta.predictor``.

    Raises:
        TraceError: An array has another dtype or shape, or they contradict each other; the
            message names the first place.
    """

    meta: TraceMeta
    loads_NLE: NDArray[np.unsignedinteger[Any]]
    tokens_N: NDArray[np.int32]
    time_s_N: NDArray[np.float64] | None = None
    decode_tokens_N: NDArray[np.int32] | None = None
    topk_ids_TLK: NDArray[np.int16] | None = None
    topk_offsets: NDArray[np.int64] | None = None
    group_N: NDArray[np.str_] | None = None
    predicted_NLE: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        num_layers, num_experts = self.meta.num_layers, self.meta.num_experts
        check_array(self.loads_NLE, "loads", dtype="u", shape=(None, num_layers, num_experts))
        count = len(self.loads_NLE)
        if count == 0:
            raise TraceError(f"loads has no {self.meta.unit}; a trace holds at least one")
        check_array(self.tokens_N, "tokens", dtype=np.dtype(np.int32), shape=(count,))
        check_not_negative(self.tokens_N, "tokens")
        check_loads(self.loads_NLE, self.tokens_N, self.meta.top_k)
        self._check_times()
        self._check_decode_tokens()
        self._check_topk()
        if self.group_N is not None:
            check_array(self.group_N, "group", dtype="U", shape=(count,))
        self._check_predicted()

    def __len__(self) -> int:
        """N."""
        return len(self.tokens_N)

    def _check_times(self) -> None:
        if self.meta.unit == "steps" and self.time_s_N is None:
            raise TraceError("time_s is missing; a trace of steps says when each one began")
        if self.meta.unit == "requests" and self.time_s_N is not None:
            raise TraceError("time_s is for steps; leave it out of a trace of requests")
        if self.time_s_N is not None:
            check_array(self.time_s_N, "time_s", dtype=np.dtype(np.float64), shape=(len(self),))
            check_times(self.time_s_N)

    def _check_decode_tokens(self) -> None:
        if self.decode_tokens_N is None:
            return
        wanted = np.dtype(np.int32)
        check_array(self.decode_tokens_N, "decode_tokens", dtype=wanted, shape=(len(self),))
        check_not_negative(self.decode_tokens_N, "decode_tokens")
        above = self.decode_tokens_N > self.tokens_N
        if above.any():
            n = int(np.argmax(above))
            raise TraceError(
                f"decode_tokens[{n}] is {self.decode_tokens_N[n]}, more than tokens[{n}] = "
                f"{self.tokens_N[n]}; tokens counts prompt and decoded tokens together"
            )

    def _check_topk(self) -> None:
        if self.topk_ids_TLK is None and self.topk_offsets is None:
            return
        if self.topk_ids_TLK is None or self.topk_offsets is None:
            missing = "topk_ids" if self.topk_ids_TLK is None else "topk_offsets"
            raise TraceError(f"{missing} is missing; topk_ids and topk_offsets come together")
        shape = (None, self.meta.num_layers, self.meta.top_k)
        check_array(self.topk_ids_TLK, "topk_ids", dtype=np.dtype(np.int16), shape=shape)
        wanted = np.dtype(np.int64)
        check_array(self.topk_offsets, "topk_offsets", dtype=wanted, shape=(len(self) + 1,))
        check_topk_ids(self.topk_ids_TLK, self.topk_offsets, self.loads_NLE, self.tokens_N)

    def _check_predicted(self) -> None:
        if self.predicted_NLE is None:
            return
        if self.meta.predictor is None:
            raise TraceError("predicted needs meta.predictor with its kind and distance")
        wanted = np.dtype(np.float32)
        check_array(self.predicted_NLE, "predicted", dtype=wanted, shape=self.loads_NLE.shape)
        check_not_negative(self.predicted_NLE, "predicted")


def read_trace(path: Path) -> RoutingTrace:
    """Read a routing trace; pickles are never loaded.

    Args:
        path: An ``.npz`` file of format version 1. Arrays that the format does not know are
            ignored.

    Raises:
        TraceError: The file cannot be read, or is not a valid trace; one line that names file,
            field and fix.
    """
    arrays = read_arrays(path, (*_REQUIRED, *_OPTIONAL))
    try:
        return _build_trace(arrays)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def write_trace(trace: RoutingTrace, path: Path) -> None:
    """Write a routing trace, compressed; the file appears only when it is whole.

    Args:
        trace: The trace; its loads are written as uint32.
        path: Where to; a file that is there is replaced.

    Raises:
        TraceError: The file cannot be written.
    """
    arrays: dict[str, Any] = {
        "version": np.int32(FORMAT_VERSION),
        "meta": np.array(trace.meta.to_json()),
        "loads": trace.loads_NLE.astype(np.uint32, copy=False),
        "tokens": trace.tokens_N,
    }
    present = {name: getattr(trace, key) for name, key in _OPTIONAL.items()}
    arrays |= {name: array for name, array in present.items() if array is not None}
    try:
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({os_reason(error)})") from error


def _build_trace(arrays: dict[str, NDArray[Any]]) -> RoutingTrace:
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise TraceError(f"{', '.join(missing)} is missing; is this a routing trace?")
    _check_version(arrays["version"])
    check_array(arrays["meta"], "meta", dtype="U", shape=())
    optional = {key: arrays.get(name) for name, key in _OPTIONAL.items()}
    return RoutingTrace(
        meta=parse_meta(str(arrays["meta"][()])),
        loads_NLE=arrays["loads"],
        tokens_N=arrays["tokens"],
        **optional,
    )


def _check_version(version: NDArray[Any]) -> None:
    # Writers that store a Python int get int64; the value is what matters.
    if version.shape != () or version.dtype.kind not in "iu":
        raise TraceError(
            f"version is {version.dtype} {list(version.shape)}; store it as one int32"
        )
    if int(version) != FORMAT_VERSION:
        raise TraceError(
            f"version is {int(version)}; this release reads version {FORMAT_VERSION}: convert "
            f"the trace, or update moeless"
        )
