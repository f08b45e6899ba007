"""What the engine's step loop counts and times, for Prometheus."""

from typing import TYPE_CHECKING

from moeless.errors import MissingExtraError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class EngineMetrics:
    """Counters of one engine; its methods are called on the engine's thread.

    Args:
        registry: Where they are exposed.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
    """

    LABELS = {  # noqa: RUF012 - a constant, for the documentation
        "moeless_engine_step_seconds": ("phase",),
        "moeless_engine_step_tokens": ("phase",),
        "moeless_engine_sequences": ("reason",),
    }

    def __init__(self, registry: "CollectorRegistry") -> None:
        try:
            from prometheus_client import Counter, Histogram
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                "metrics need prometheus_client; pip install 'moeless[serve]'"
            ) from exc
        labels = self.LABELS
        self._queue = Histogram(
            "moeless_queue_seconds",
            "From the submission of a sequence to its first forward.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._step = Histogram(
            "moeless_engine_step_seconds",
            "Time of one forward through the model.",
            labels["moeless_engine_step_seconds"],
            buckets=_STEP_S,
            registry=registry,
        )
        self._tokens = Counter(
            "moeless_engine_step_tokens",
            "Tokens that forwards have computed, of prompts (prefill) and generated (decode).",
            labels["moeless_engine_step_tokens"],
            registry=registry,
        )
        self._sequences = Counter(
            "moeless_engine_sequences",
            "Sequences that have ended, by the reason.",
            labels["moeless_engine_sequences"],
            registry=registry,
        )

    def record_start(self, wait_s: float) -> None:
        """A sequence has its first forward after so long in the queue."""
        self._queue.observe(wait_s)

    def record_step(self, phase: str, *, tokens: int, duration_s: float) -> None:
        """A forward is done."""
        self._step.labels(phase).observe(duration_s)
        self._tokens.labels(phase).inc(tokens)

    def record_end(self, reason: str) -> None:
        """A sequence has ended."""
        self._sequences.labels(reason).inc()
