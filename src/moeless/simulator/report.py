"""OUT.json: the figures of all policies, the trace, and every setting."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moeless.core.whole_file import written_whole
from moeless.errors import ConfigError, os_reason
from moeless.simulator.metrics import count_idle_layer_steps
from moeless.simulator.recording import num_warm_up_steps
from moeless.workloads.routing_trace import RoutingTrace


def describe_trace(trace: RoutingTrace, *, file: str) -> dict[str, Any]:
    """What was replayed, ready for JSON.

    Args:
        trace: The steps.
        file: Name of the file it came from.
    """
    meta = trace.meta
    assert trace.time_s_N is not None
    warm_up = num_warm_up_steps(len(trace))
    idle = count_idle_layer_steps(trace.loads_NLE)
    return {
        "file": file,
        "model": meta.model,
        "phase": meta.phase,
        "source": meta.source,
        "licence": meta.licence,
        "layers": meta.num_layers,
        "experts": meta.num_experts,
        "top_k": meta.top_k,
        "steps": len(trace),
        "warm_up_steps": warm_up,
        "layer_steps": (len(trace) - warm_up) * meta.num_layers - idle,
        "zero_token_layer_steps": idle,
        "tokens": int(trace.tokens_N.sum(dtype=np.int64)),
        "duration_s": float(trace.time_s_N[-1] - trace.time_s_N[0]),
        "extra": meta.extra,
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report; the file appears only when it is whole.

    Raises:
        ConfigError: It cannot be written.
    """
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    try:
        with written_whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({os_reason(error)})") from error
