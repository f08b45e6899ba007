"""What a running model looks like at one moment: the input of metrics, dashboards and dumps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray, ReplicaArray
from moeless.telemetry.counters import without_nan
from moeless.telemetry.percentiles import SampleWindow


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long something takes.

    Args:
        count: Times it happened.
        total_s: Seconds it took in all.
        p50_s: Median of the newest samples.
        p99_s: 99th percentile of the newest samples.
    """

    count: int = 0
    total_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0

    @classmethod
    def of(cls, window: SampleWindow) -> "Timing":
        """Summarise a window of samples in seconds."""
        found = window.percentiles()
        return cls(
            count=window.count, total_s=window.total, p50_s=found["p50"], p99_s=found["p99"]
        )


@dataclass(frozen=True, kw_only=True)
class GbSeconds:
    """Memory times time under four accountings, in GB s (GB = 10^9 bytes).

    Args:
        billed: Bytes x time while a function executes: what a serverless user pays.
        resident: Bytes x time while on a device, idle included: what the operator holds.
        reserved: Whole device budgets x time: what a serverful deployment holds.
        paper: The MoEless paper's own comparison: layer time x the bytes charged for the layer.
    """

    billed: float = 0.0
    resident: float = 0.0
    reserved: float = 0.0
    paper: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PredictorState:
    """What expects a model's loads.

    Args:
        kind: ``gate``, ``trained``, ``auto``, or the predictor that looks back.
        distance: Layers that it looks ahead; 0 for one that looks back.
        source: Directory of a trained one.
        swaps: Times that ``auto`` has put a better one in place.
    """

    kind: str
    distance: int
    source: str | None = None
    swaps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RuntimeSnapshot:
    """One model at one moment. Counts are since it was loaded.

    Args:
        model: Model id.
        devices: Labels of the devices that are there, D of them; others come and go.
        steps: Iterations of the engine.
        tokens_LE: Tokens routed to each expert, int64 [L, E].
        replicas_LED: Warm replicas now, uint8 [L, E, D].
        planned_LED: Copies in the plans in force, uint8 [L, E, D]; more than 1 only where a
            policy's slots repeat an expert on a device.
        device_tokens_LD: Tokens computed by each device, int64 [L, D].
        straggler_mean_L: Mean over steps of max device tokens / ceil(mean device tokens),
            float64 [L]; NaN for a layer without tokens so far.
        straggler_last_L: The same ratio in the newest step, float64 [L]; NaN as above.
        straggler_static_mean_L: The mean that static expert parallelism (contiguous blocks of
            experts) would have had for the same loads, float64 [L]; None where it is unknown.
        layer_steps_L: Steps in which each layer had tokens, int64 [L]; None where it is unknown.
        expected_LE: Tokens that were expected for the newest step, float64 [L, E]; rows of NaN
            for layers without a forecast for it; None where it is unknown.
        actual_LE: Tokens that came, float64 [L, E]; None where it is unknown.
        warm_starts: Experts whose tokens found a warm replica.
        cold_starts: Replicas loaded onto a device, ahead of their tokens or not.
        cold_starts_L: The same by layer [L].
        warm_starts_L: Warm starts by layer [L].
        blocking_loads: Loads that a token waited for.
        evictions: Instances that left a device.
        plans: Plans put in force.
        plans_early_share: Share of plans in force before their layer ran, 0 to 1.
        replicas_warm_share: Share of planned replicas warm when their layer ran, 0 to 1.
        plan_s: Time of one planning decision.
        split_s: Time of one split, on the token path.
        layer_forward_s: Time of one MoE layer.
        forecast_s: Time of one look-ahead; up to 256 tokens it is spent on the token path.
        prediction_accuracy_L: Mean load accuracy of each layer's newest predictions, float64 [L],
            0 to 1; NaN for a layer without predictions.
        predictor: What expects the loads.
        instances_D: State to instances in it on each device [D].
        resident_bytes_D: Bytes of experts on each device [D].
        budget_bytes_D: Bytes that experts may take on each device [D].
        gb_s: Memory times time.
        gb_s_L: The same by layer, accounting to [L].
        worker_restarts_D: Times each device's worker was started again [D].
        failed_loads_D: Loads that failed on each device and were rolled back [D].
        events_lost: Events that could not be written, of all models of the platform.
        loaded_bytes_D: Bytes that loads have brought onto each device [D].
        loading_s_D: Seconds in which each device loaded [D]; bytes by them is its bandwidth.
        cold_start_s_D: From the order to load a replica until it was warm, on each device [D].
        device_speed_D: Relative speed that each device has shown of late [D], 1 unless it is much
            slower than the others; empty where nobody looks.
        planned_speed_D: Relative speed of each device that plans are made for [D].
        device_states_D: ``starting``, ``up``, ``draining`` or ``drained`` [D]; None where devices
            are always up.
    """

    model: str
    devices: tuple[str, ...]
    steps: int
    tokens_LE: CountArray
    replicas_LED: ReplicaArray
    planned_LED: ReplicaArray
    device_tokens_LD: CountArray
    straggler_mean_L: NDArray[np.float64]
    straggler_last_L: NDArray[np.float64]
    warm_starts: int
    cold_starts: int
    cold_starts_L: CountArray
    warm_starts_L: CountArray
    blocking_loads: int
    evictions: int
    plans: int
    plans_early_share: float
    replicas_warm_share: float
    plan_s: Timing
    split_s: Timing
    layer_forward_s: Timing = field(default_factory=Timing)
    forecast_s: Timing = field(default_factory=Timing)
    prediction_accuracy_L: NDArray[np.float64]
    predictor: PredictorState = PredictorState(kind="previous", distance=0)
    instances_D: Mapping[str, tuple[int, ...]]
    resident_bytes_D: tuple[int, ...]
    budget_bytes_D: tuple[int, ...]
    gb_s: GbSeconds
    gb_s_L: Mapping[str, tuple[float, ...]]
    worker_restarts_D: tuple[int, ...]
    failed_loads_D: tuple[int, ...] = ()
    events_lost: int = 0
    loaded_bytes_D: tuple[int, ...] = ()
    loading_s_D: tuple[float, ...] = ()
    cold_start_s_D: tuple[Timing, ...] = ()
    device_speed_D: tuple[float, ...] = ()
    planned_speed_D: tuple[float, ...] = ()
    device_states_D: tuple[str, ...] | None = None
    straggler_static_mean_L: NDArray[np.float64] | None = None
    layer_steps_L: CountArray | None = None
    expected_LE: NDArray[np.float64] | None = None
    actual_LE: NDArray[np.float64] | None = None

    @property
    def states_D(self) -> tuple[str, ...]:
        """The state of each device [D]."""
        return self.device_states_D or ("up",) * len(self.devices)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.tokens_LE.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.tokens_LE.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON.

        Keys are the fields' names without shape suffix (with ``_by_layer`` in place of ``_L``
        where a total has the name), plus ``layers`` and ``experts``; arrays
        are nested lists in the order of their suffix, NaN is null; timings, GB s and the
        predictor are objects.
        """
        result: dict[str, Any] = {"layers": self.num_layers, "experts": self.num_experts}
        for item in fields(self):
            name, _, suffix = item.name.rpartition("_")
            key = name if suffix.isupper() else item.name
            key = f"{name}_by_layer" if suffix == "L" and key in result else key
            result[key] = _to_json(getattr(self, item.name))
        return result


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim > 1:
        return [_to_json(row) for row in value]
    if isinstance(value, np.ndarray):
        return without_nan(value) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, Timing | GbSeconds | PredictorState):
        return dict(vars(value))
    if isinstance(value, Mapping):
        return {key: list(counts) for key, counts in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value
