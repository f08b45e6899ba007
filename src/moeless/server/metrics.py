"""The server's own Prometheus metrics, in a registry of their own."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moeless.core.generation import EngineStats
from moeless.telemetry.percentiles import SampleWindow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RECENT = 256
"""Samples behind the dashboard's percentiles."""
_RATE_S = 5
"""Seconds behind the dashboard's tokens per second."""
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """A metric as the documentation shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_LABELS = {
    "moeless_http_requests": ("path", "status_class"),
    "moeless_http_refused": ("code",),
    "moeless_time_to_first_token_seconds": ("path",),
    "moeless_inter_token_latency_seconds": ("path",),
    "moeless_time_per_output_token_seconds": ("path",),
    "moeless_request_duration_seconds": ("path", "outcome"),
}


@dataclass(kw_only=True)
class TokensSoFar:
    """Tokens since the server began."""

    prompt: int = 0
    generated: int = 0


class TokenRate:
    """Tokens per second over the newest seconds. One thread counts, any may ask.

    Args:
        clock_s: Seconds on a monotonic clock.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._counts: deque[tuple[int, int]] = deque(((0, 0),), maxlen=_RATE_S)

    def add(self, tokens: int) -> None:
        """Tokens were generated now."""
        second = int(self._clock_s())
        last, count = self._counts[-1]
        if last == second:
            self._counts[-1] = second, count + tokens
        else:
            self._counts.append((second, tokens))

    def per_second(self) -> float:
        """The mean over the newest seconds, the one that has just begun included."""
        now_s = self._clock_s()
        first = int(now_s) - _RATE_S + 1
        count = sum(tokens for second, tokens in list(self._counts) if second >= first)
        return count / max(1.0, now_s - max(first, self._began_s))


class ServerMetrics:
    """What the server counts and times.

    Args:
        engine_stats: Read at each scrape for the queue gauges.
    """

    def __init__(self, engine_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self.tokens_so_far = TokensSoFar()
        # Histograms have no exact percentiles; the dashboard shows those of the newest requests.
        self.recent_tokens = TokenRate()
        self.recent_ttft = SampleWindow(_RECENT)
        self.recent_tpot = SampleWindow(_RECENT)
        self.recent_duration = SampleWindow(_RECENT)
        self.http_requests = Counter(
            "moeless_http_requests",
            "HTTP requests answered.",
            _LABELS["moeless_http_requests"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "moeless_http_requests_in_flight",
            "HTTP requests being answered.",
            registry=self._registry,
        )
        self.refused = Counter(
            "moeless_http_refused",
            "Requests refused at the door: no valid key, a limit, a page of another site.",
            _LABELS["moeless_http_refused"],
            registry=self._registry,
        )
        self.time_to_first_token = Histogram(
            "moeless_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each of its choices.",
            _LABELS["moeless_time_to_first_token_seconds"],
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self.inter_token_latency = Histogram(
            "moeless_inter_token_latency_seconds",
            "Between the tokens of one choice.",
            _LABELS["moeless_inter_token_latency_seconds"],
            buckets=_GAP_S,
            registry=self._registry,
        )
        self.time_per_output_token = Histogram(
            "moeless_time_per_output_token_seconds",
            "Mean time of each further token of one choice after its first.",
            _LABELS["moeless_time_per_output_token_seconds"],
            buckets=_GAP_S,
            registry=self._registry,
        )
        self.request_duration = Histogram(
            "moeless_request_duration_seconds",
            "From the arrival of a generation request to the end of its answer.",
            _LABELS["moeless_request_duration_seconds"],
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "moeless_prompt_tokens", "Prompt tokens accepted.", registry=self._registry
        )
        self.generated_tokens = Counter(
            "moeless_generated_tokens", "Tokens generated.", registry=self._registry
        )
        self.ledger_lost_minutes = Counter(
            "moeless_ledger_lost_minutes",
            "Minutes of usage that could not be written to the ledger for so long that they are "
            "lost.",
            registry=self._registry,
        )
        for name, text, read in (
            ("running", "Sequences in the engine's batch.", lambda: engine_stats().running),
            ("waiting", "Sequences in the engine's queue.", lambda: engine_stats().waiting),
        ):
            Gauge(f"moeless_engine_{name}_requests", text, registry=self._registry).set_function(
                read
            )

    def count_prompt(self, tokens: int) -> None:
        """Prompts were accepted."""
        self.prompt_tokens.inc(tokens)
        self.tokens_so_far.prompt += tokens

    def count_generated(self, tokens: int) -> None:
        """Tokens were generated."""
        self.generated_tokens.inc(tokens)
        self.tokens_so_far.generated += tokens
        self.recent_tokens.add(tokens)

    def time_first_token(self, path: str, seconds: float) -> None:
        """A choice has its first token."""
        self.time_to_first_token.labels(path).observe(seconds)
        self.recent_ttft.add(seconds)

    def time_output_token(self, path: str, seconds: float) -> None:
        """A choice has ended; its further tokens took so long each."""
        self.time_per_output_token.labels(path).observe(seconds)
        self.recent_tpot.add(seconds)

    def time_request(self, path: str, outcome: str, seconds: float) -> None:
        """A generation request has ended."""
        self.request_duration.labels(path, outcome).observe(seconds)
        self.recent_duration.add(seconds)

    def families(self) -> list["MetricFamily"]:
        """Name, kind, labels and meaning of each metric, for the documentation."""
        return families_of(self._registry, _LABELS)

    def render(self) -> bytes:
        """Prometheus text of this server."""
        return generate_latest(self._registry)


def families_of(
    registry: CollectorRegistry, labels: Mapping[str, tuple[str, ...]]
) -> list[MetricFamily]:
    """What is in a registry, for the documentation.

    Args:
        registry: Its metrics have been made, with or without values.
        labels: Label names of the metrics that have some.
    """
    found = []
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        found.append(
            MetricFamily(
                name=name,
                kind=metric.type,
                labels=labels.get(metric.name, ()),
                help=metric.documentation,
            )
        )
    return found


def combine_metrics(own: bytes, other: bytes) -> bytes:
    """Two expositions as one; their metric names must differ."""
    texts = [text for text in (own, other) if text]
    return b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts)
