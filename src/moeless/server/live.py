"""What the dashboard asks for once a second: small for large models, cheap for many viewers.

Large arrays are the little-endian bytes of typed arrays in base64; one snapshot serves everybody
who asks within half a second.
"""

import base64
import datetime
import gzip
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.generation import EngineStats
from moeless.server.metrics import ServerMetrics
from moeless.telemetry.counters import without_nan
from moeless.telemetry.snapshot import RuntimeSnapshot, Timing

_FRESH_S = 0.5
_GZIP_FROM_BYTES = 4096
_COUNTERS = (
    "warm_starts",
    "cold_starts",
    "blocking_loads",
    "evictions",
    "plans",
    "plans_early_share",
    "replicas_warm_share",
)


class LiveFeed:
    """Snapshots as bytes. Any thread may ask.

    Args:
        take_snapshot: State of the experts.
        engine_stats: State of the engine.
        metrics: Counts and latencies of the server.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], RuntimeSnapshot],
        engine_stats: Callable[[], EngineStats],
        metrics: ServerMetrics,
    ) -> None:
        self._take_snapshot = take_snapshot
        self._engine_stats = engine_stats
        self._metrics = metrics
        self._lock = threading.Lock()
        self._taken_s = -_FRESH_S
        self._snapshot: RuntimeSnapshot | None = None
        self._text = ""

    def render(self, layer: int, *, compress: bool) -> tuple[bytes, bool]:
        """The state now, with the loads of one layer in detail.

        Args:
            layer: The layer; one that does not exist has no detail.
            compress: Whether the client takes gzip.

        Returns:
            JSON, and whether it is compressed.

        Raises:
            MoelessError: The experts do not answer.
        """
        snapshot, text = self._refresh()
        detail = json.dumps(_detail(snapshot, layer), separators=(",", ":"), allow_nan=False)
        body = f'{text[:-1]},"detail":{detail}}}'.encode()
        if compress and len(body) >= _GZIP_FROM_BYTES:
            return gzip.compress(body, compresslevel=1, mtime=0), True
        return body, False

    def _refresh(self) -> tuple[RuntimeSnapshot, str]:
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._taken_s >= _FRESH_S:
                snapshot = self._take_snapshot()
                state = describe_state(snapshot) | {"requests": self._requests()}
                self._text = json.dumps(state, separators=(",", ":"), allow_nan=False)
                self._snapshot, self._taken_s = snapshot, time.monotonic()
            return self._snapshot, self._text

    def _requests(self) -> dict[str, Any]:
        stats = self._engine_stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "prompt_tokens": self._metrics.tokens_so_far.prompt,
            "generated_tokens": self._metrics.tokens_so_far.generated,
            "tokens_per_second": self._metrics.recent_tokens.per_second(),
            "ttft": asdict(Timing.of(self._metrics.recent_ttft)),
            "tpot": asdict(Timing.of(self._metrics.recent_tpot)),
            "duration": asdict(Timing.of(self._metrics.recent_duration)),
        }


def describe_state(snapshot: RuntimeSnapshot) -> dict[str, Any]:
    """A snapshot as JSON whose size grows little with the number of experts."""
    steps_L = snapshot.layer_steps_L
    if steps_L is None:
        steps_L = np.zeros(snapshot.num_layers, dtype=np.int64)
    return {
        "time_s": datetime.datetime.now(tz=datetime.UTC).timestamp(),
        "model": snapshot.model,
        "layers": snapshot.num_layers,
        "experts": snapshot.num_experts,
        "devices": list(snapshot.devices),
        "device_states": list(snapshot.states_D),
        "steps": snapshot.steps,
        "predictor": asdict(snapshot.predictor),
        **{name: getattr(snapshot, name) for name in _COUNTERS},
        "gb_s": asdict(snapshot.gb_s),
        "instances": {state: list(counts) for state, counts in snapshot.instances_D.items()},
        "resident_bytes": list(snapshot.resident_bytes_D),
        "budget_bytes": list(snapshot.budget_bytes_D),
        "worker_restarts": list(snapshot.worker_restarts_D),
        "loaded_bytes": list(snapshot.loaded_bytes_D),
        "loading_s": list(snapshot.loading_s_D),
        "cold_start": [asdict(timing) for timing in snapshot.cold_start_s_D],
        "device_tokens": snapshot.device_tokens_LD.sum(axis=0).tolist(),
        "layer_forward": asdict(snapshot.layer_forward_s),
        "plan": asdict(snapshot.plan_s),
        "split": asdict(snapshot.split_s),
        "layer_steps": steps_L.tolist(),
        "straggler_sum": _sums(snapshot.straggler_mean_L, steps_L),
        "static_sum": _sums(snapshot.straggler_static_mean_L, steps_L),
        "accuracy": without_nan(snapshot.prediction_accuracy_L),
        "tokens": pack(snapshot.tokens_LE, np.uint32),
        "replicas": pack(snapshot.replicas_LED.sum(axis=2), np.uint8),
        "planned": pack(snapshot.planned_LED.sum(axis=2), np.uint8),
    }


def pack(values: NDArray[Any], dtype: type[np.unsignedinteger[Any]]) -> dict[str, Any]:
    """An array as base64; counts beyond the type wrap around, so differences stay right."""
    array = values.astype(np.dtype(dtype).newbyteorder("<"))
    return {
        "type": f"uint{8 * array.itemsize}",
        "shape": list(array.shape),
        "base64": base64.b64encode(array.tobytes()).decode("ascii"),
    }


def _sums(mean_L: NDArray[np.float64] | None, steps_L: NDArray[np.int64]) -> list[float] | None:
    """Sums over steps, of which a reader can take the mean over any time."""
    return None if mean_L is None else np.where(steps_L > 0, mean_L * steps_L, 0.0).tolist()


def _detail(snapshot: RuntimeSnapshot, layer: int) -> dict[str, Any] | None:
    if not 0 <= layer < snapshot.num_layers:
        return None
    return {
        "layer": layer,
        "expected": _row(snapshot.expected_LE, layer),
        "actual": _row(snapshot.actual_LE, layer),
        "device_tokens": snapshot.device_tokens_LD[layer].tolist(),
    }


def _row(values_LE: NDArray[np.float64] | None, layer: int) -> list[float] | None:
    if values_LE is None or np.isnan(values_LE[layer]).any():
        return None
    return [round(value, 2) for value in values_LE[layer].tolist()]
