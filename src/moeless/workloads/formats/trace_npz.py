"""Reads MoEless routing traces (``.npz``, version 1)."""

from pathlib import Path

import numpy as np

from moeless.workloads.formats.expert_loads import ExpertLoads
from moeless.workloads.routing_trace import read_trace


def read_trace_loads(path: Path) -> ExpertLoads:
    """Add up the steps (or requests) of a routing trace.

    Args:
        path: The file.

    Raises:
        TraceError: It is no valid trace.
    """
    trace = read_trace(path)
    return ExpertLoads(
        loads_LE=trace.loads_NLE.sum(axis=0, dtype=np.int64),
        layer_ids=trace.meta.layer_ids,
        source=f"{path.name} (routing trace of {trace.meta.model})",
        steps=max(len(trace), 1),
        top_k=trace.meta.top_k,
    )
