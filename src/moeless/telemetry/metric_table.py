"""The Prometheus metrics as data: what ``/metrics`` exposes and the documentation lists."""

from dataclasses import dataclass
from typing import Literal

PREFIX = "moeless_"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Args:
        name: Without the prefix; counters without ``_total``.
        kind: Its Prometheus type.
        labels: Label names.
        unit: Unit of the value.
        help: One sentence.
    """

    name: str
    kind: Literal["counter", "gauge", "summary"]
    labels: tuple[str, ...]
    unit: str
    help: str

    @property
    def exposed_name(self) -> str:
        """The name that a query uses."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", labels=("model", *labels), unit=unit, help=text)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", labels=("model", *labels), unit=unit, help=text)


def _summary(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="summary", labels=("model", *labels), unit="seconds", help=text)


METRICS: tuple[Metric, ...] = (
    _counter("function_cold_starts", "loads", "Replicas loaded onto a device, prewarmed or not."),
    _counter("function_warm_starts", "invocations", "Experts whose tokens found a warm replica."),
    _counter("function_blocking_loads", "loads", "Loads that a token waited for."),
    _counter("function_evictions", "instances", "Instances that left their device."),
    _gauge("function_instances", "instances", "Function instances.", "device", "state"),
    _counter("expert_tokens", "tokens", "Tokens routed to experts.", "layer_group"),
    _gauge(
        "layer_straggler_ratio",
        "ratio",
        "Max device tokens / ceil(mean device tokens) in the newest step; 1 is ideal.",
        "layer_group",
    ),
    _summary("layer_forward_seconds", "Time of one MoE layer."),
    _summary("plan_seconds", "Time of one planning decision."),
    _summary("split_seconds", "Time to divide one layer's tokens over replicas."),
    _gauge(
        "prediction_accuracy",
        "ratio",
        "1 - half the total variation between predicted and true load, mean over about the last "
        "256 steps; 1 is exact.",
        "layer_group",
    ),
    _gauge(
        "predictor_info",
        "1",
        "1 for the predictor in use: gate, trained, auto, or one that looks back.",
        "kind",
    ),
    _counter("predictor_swaps", "swaps", "Times that auto put a better predictor in place."),
    _counter("billed_gb_seconds", "GB s", "Memory x time while functions execute."),
    _counter("resident_gb_seconds", "GB s", "Memory x time of experts on devices."),
    _counter("reserved_gb_seconds", "GB s", "Memory x time of whole device budgets."),
    _gauge(
        "device_memory_bytes",
        "bytes",
        "Expert memory of a device: state is resident or budget.",
        "device",
        "state",
    ),
    _gauge(
        "device_state",
        "1",
        "1 for the state that a device is in, 0 for the others: starting, up, draining, drained.",
        "device",
        "state",
    ),
    _counter("worker_restarts", "restarts", "Times a device's worker was restarted.", "device"),
    _gauge(
        "device_speed",
        "ratio",
        "Relative speed that a device has shown of late; 1 unless it is much slower than others.",
        "device",
    ),
    _gauge(
        "device_planned_speed",
        "ratio",
        "Relative speed that plans are made for: what engines agree on, clear and for some time.",
        "device",
    ),
    _counter("loaded_bytes", "bytes", "Weights that loads brought onto a device.", "device"),
    _counter(
        "loading_seconds",
        "seconds",
        "Time in which a device loaded; loaded bytes by it is the bandwidth of loads.",
        "device",
    ),
    _summary(
        "cold_start_seconds",
        "From the order to load a replica until it was warm; quantiles of the newest 512.",
        "device",
    ),
    _counter("failed_loads", "loads", "Loads that failed and were rolled back.", "device"),
    _counter("events_lost", "events", "Events that could not be written to the file of --events."),
)


def render_metric_table() -> str:
    """The metrics as a Markdown table, for the documentation."""
    lines = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(metric.labels + (("quantile",) if metric.kind == "summary" else ()))
        lines.append(
            f"| `{metric.exposed_name}` | {metric.kind} | {labels} | {metric.unit} "
            f"| {metric.help} |"
        )
    return "\n".join(lines) + "\n"
