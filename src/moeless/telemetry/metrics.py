"""Exposes a running model to Prometheus.

The collector reads a snapshot at each scrape; nothing is counted twice, and the token path does
not know that Prometheus exists. Needs ``prometheus_client``, imported when first used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeless.errors import MissingExtraError
from moeless.telemetry.metric_table import METRICS, PREFIX, Metric
from moeless.telemetry.snapshot import RuntimeSnapshot, Timing

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

Sample = tuple[tuple[str, ...], float]

MAX_LAYER_GROUPS = 4
_STATES = ("starting", "up", "draining", "drained")


def layer_groups(num_layers: int) -> list[tuple[str, slice]]:
    """Contiguous groups of layers, at most four, so that series stay few.

    Returns:
        Labels such as ``0-7`` (first and last layer) with the layers they stand for.
    """
    edges = np.linspace(0, num_layers, min(MAX_LAYER_GROUPS, num_layers) + 1).astype(int).tolist()
    return [(f"{first}-{end - 1}", slice(first, end)) for first, end in pairwise(edges)]


class RuntimeCollector:
    """A Prometheus collector over snapshots.

    Args:
        take_snapshot: Returns the model's state now, or None while there is none.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
    """

    def __init__(self, take_snapshot: Callable[[], RuntimeSnapshot | None]) -> None:
        try:
            import prometheus_client.metrics_core as families
        except ImportError as error:
            raise MissingExtraError(
                "metrics need prometheus_client; pip install 'moeless[serve]'"
            ) from error
        self._families = families
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterator["Family"]:
        """All metrics of one scrape."""
        snapshot = self._take_snapshot()
        if snapshot is None:
            return
        timings, samples = _timings(snapshot), _samples(snapshot)
        for metric in METRICS:
            if metric.kind == "summary":
                yield self._summary(metric, snapshot.model, timings[metric.name])
            else:
                yield self._family(metric, snapshot.model, samples[metric.name])

    def describe(self) -> Iterator["Family"]:
        """The metrics' names, so that registering takes no snapshot."""
        for metric in METRICS:
            yield self._families.Metric(PREFIX + metric.name, metric.help, metric.kind)

    def _family(self, metric: Metric, model: str, samples: Iterable[Sample]) -> "Family":
        kind = (
            self._families.CounterMetricFamily
            if metric.kind == "counter"
            else self._families.GaugeMetricFamily
        )
        family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            family.add_metric((model, *labels), value)
        return family

    def _summary(
        self, metric: Metric, model: str, timings: Iterable[tuple[tuple[str, ...], Timing]]
    ) -> "Family":
        # The client's own summary family has no quantiles.
        name = PREFIX + metric.name
        family = self._families.Metric(name, metric.help, "summary")
        for values, timing in timings:
            labels = dict(zip(metric.labels, (model, *values), strict=True))
            for quantile, value in (("0.5", timing.p50_s), ("0.99", timing.p99_s)):
                family.add_sample(name, labels | {"quantile": quantile}, value)
            family.add_sample(f"{name}_count", labels, timing.count)
            family.add_sample(f"{name}_sum", labels, timing.total_s)
        return family


def register_runtime(
    registry: "CollectorRegistry", take_snapshot: Callable[[], RuntimeSnapshot | None]
) -> RuntimeCollector:
    """Add a model's metrics to a Prometheus registry.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
    """
    collector = RuntimeCollector(take_snapshot)
    registry.register(collector)
    return collector


def _timings(snapshot: RuntimeSnapshot) -> dict[str, list[tuple[tuple[str, ...], Timing]]]:
    by_device = zip(snapshot.devices, snapshot.cold_start_s_D, strict=False)
    return {
        "layer_forward_seconds": [((), snapshot.layer_forward_s)],
        "plan_seconds": [((), snapshot.plan_s)],
        "split_seconds": [((), snapshot.split_s)],
        "cold_start_seconds": [((device,), timing) for device, timing in by_device],
    }


def _samples(snapshot: RuntimeSnapshot) -> dict[str, list[Sample]]:
    groups = layer_groups(snapshot.num_layers)
    tokens_L = snapshot.tokens_LE.sum(axis=1)
    memory = {"resident": snapshot.resident_bytes_D, "budget": snapshot.budget_bytes_D}
    return {
        "function_cold_starts": [((), snapshot.cold_starts)],
        "function_warm_starts": [((), snapshot.warm_starts)],
        "function_blocking_loads": [((), snapshot.blocking_loads)],
        "function_evictions": [((), snapshot.evictions)],
        "function_instances": _by_device(snapshot.devices, snapshot.instances_D.items()),
        "expert_tokens": [((label,), float(tokens_L[part].sum())) for label, part in groups],
        "layer_straggler_ratio": _group_means(groups, snapshot.straggler_last_L),
        "prediction_accuracy": _group_means(groups, snapshot.prediction_accuracy_L),
        "predictor_info": [((snapshot.predictor.kind,), 1.0)],
        "predictor_swaps": [((), snapshot.predictor.swaps)],
        "billed_gb_seconds": [((), snapshot.gb_s.billed)],
        "resident_gb_seconds": [((), snapshot.gb_s.resident)],
        "reserved_gb_seconds": [((), snapshot.gb_s.reserved)],
        "device_memory_bytes": _by_device(snapshot.devices, memory.items()),
        "worker_restarts": _device_values(snapshot.devices, snapshot.worker_restarts_D),
        "device_speed": _device_values(snapshot.devices, snapshot.device_speed_D),
        "device_planned_speed": _device_values(snapshot.devices, snapshot.planned_speed_D),
        "loaded_bytes": _device_values(snapshot.devices, snapshot.loaded_bytes_D),
        "loading_seconds": _device_values(snapshot.devices, snapshot.loading_s_D),
        "events_lost": [((), snapshot.events_lost)],
        "failed_loads": _device_values(snapshot.devices, snapshot.failed_loads_D),
        "device_state": [
            ((device, state), float(state == now))
            for device, now in zip(snapshot.devices, snapshot.states_D, strict=True)
            for state in _STATES
        ],
    }


def _device_values(devices: tuple[str, ...], values_D: Sequence[float]) -> list[Sample]:
    """One value of each device; none where nobody has any."""
    return [((device,), value) for device, value in zip(devices, values_D, strict=False)]


def _by_device(
    devices: tuple[str, ...], states: Iterable[tuple[str, tuple[int, ...]]]
) -> list[Sample]:
    return [
        ((device, state), value)
        for state, values in states
        for device, value in zip(devices, values, strict=True)
    ]


def _group_means(groups: list[tuple[str, slice]], values_L: NDArray[np.float64]) -> list[Sample]:
    """Means over the layers that have a value; a group without any has no series."""
    known = [(label, values_L[part][~np.isnan(values_L[part])]) for label, part in groups]
    return [((label,), float(values.mean())) for label, values in known if values.size]
