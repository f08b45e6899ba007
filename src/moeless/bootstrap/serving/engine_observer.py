"""Tells the metrics what the step loop does."""

from moeless.core.generation import FinishReason
from moeless.engines.transformers.generation.observer import GenerationObserver, Phase
from moeless.telemetry.engine_metrics import EngineMetrics


class MeteringObserver(GenerationObserver):
    """Passes what is counted on to the metrics.

    Args:
        metrics: Count.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def request_started(self, wait_s: float) -> None:
        """A request's first forward begins."""
        self._metrics.record_start(wait_s)

    def step_finished(self, phase: Phase, tokens: int, duration_s: float) -> None:
        """A forward is done."""
        self._metrics.record_step(phase, tokens=tokens, duration_s=duration_s)

    def request_finished(
        self,
        reason: FinishReason,
        prompt_tokens: int,  # noqa: ARG002 - the observer's
        completion_tokens: int,  # noqa: ARG002
        duration_s: float,  # noqa: ARG002
    ) -> None:
        """A request has ended."""
        self._metrics.record_end(reason)
