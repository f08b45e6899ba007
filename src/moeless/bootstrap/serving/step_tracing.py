"""Shows the layers and invocations of some engine steps in traces.

The step loop and the dispatcher do not know that they are traced: they are listened to and
wrapped, and only where traces are asked for. All of this runs on the engine's thread.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moeless.bootstrap.serving.experts import ExpertsRuntime
from moeless.core.plan import CountArray
from moeless.engines.transformers.generation.observer import StepPart
from moeless.engines.transformers.loader import LoadedModel, attach_runtime
from moeless.functions.links.board import Board
from moeless.functions.token_path.dispatch import ExpertDispatcher
from moeless.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class StepTracer:
    """Chooses steps and makes their spans. A ``StepRecorder``.

    Args:
        tracing: Knows the requests that are traced.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._steps = 0
        self._step: Span | None = None
        self._inner: Span | None = None
        self._layer_ns = 0

    @property
    def is_on(self) -> bool:
        """Whether the current step is shown."""
        return self._step is not None

    def begin_step(self, parts: Sequence[StepPart], at_s: float) -> None:  # noqa: ARG002
        """Show this step if it is one's turn and a traced request takes part."""
        self._end_step(failed=True)
        shown = None
        for part in parts:
            sequence = self._tracing.live.get(part.request_id)
            if sequence is not None:
                sequence.started_ns = sequence.started_ns or time.time_ns()
                shown = shown or sequence
        if shown is None:
            return
        self._steps += 1
        if self._steps % self._tracing.config.every_steps == 1 % self._tracing.config.every_steps:
            self._step = self._start(f"step {parts[0].phase}", shown.trace.span)
            self._step.set_attribute("moeless.sequences", len(parts))
            self._step.set_attribute("moeless.tokens", sum(part.tokens for part in parts))

    def keep_step(self) -> None:
        """The step is done."""
        self._end_step(failed=False)

    def begin_layer(self, layer: int, tokens: int) -> None:
        """A layer of a shown step begins."""
        assert self._step is not None
        self._layer_ns = time.time_ns()
        self._inner = self._start(f"layer {layer}", self._step, self._layer_ns)
        self._inner.set_attribute("moeless.tokens", tokens)

    def end_layer(self) -> None:
        """It has ended."""
        if self._inner is not None:
            self._inner.end()
            self._inner = None

    def write_invocations(self, busy_ns_D: CountArray, tokens_D: CountArray) -> None:
        """Make a span of the work of each device in the current layer.

        How long a device computed is known, not when; it is taken to have begun at once.

        Args:
            busy_ns_D: How long, nanoseconds, int64 [D].
            tokens_D: Assignments that it computed, int64 [D].
        """
        if self._inner is None:
            return
        for device, (busy_ns, tokens) in enumerate(
            zip(busy_ns_D.tolist(), tokens_D.tolist(), strict=True)
        ):
            if tokens:
                span = self._start(f"invoke device {device}", self._inner, self._layer_ns)
                span.set_attribute("moeless.assignments", tokens)
                span.end(end_time=self._layer_ns + busy_ns)

    def _start(self, name: str, parent: "Span", at_ns: int | None = None) -> "Span":
        from opentelemetry.trace import set_span_in_context

        context: Context = set_span_in_context(parent)
        return self._tracing.tracer.start_span(name, context=context, start_time=at_ns)

    def _end_step(self, *, failed: bool) -> None:
        self.end_layer()
        if self._step is not None:
            if failed:
                from opentelemetry.trace import Status, StatusCode

                self._step.set_status(Status(StatusCode.ERROR))
            self._step.end()
            self._step = None


class TracedLayers:
    """A dispatcher whose layers are shown.

    Args:
        dispatcher: Computes them.
        board: Knows how long each device has computed.
        tracer: Shows them.
    """

    def __init__(self, dispatcher: ExpertDispatcher, board: Board, tracer: StepTracer) -> None:
        self._dispatcher = dispatcher
        self._board = board
        self._tracer = tracer

    def __call__(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute a layer's routed experts; see ``ExpertDispatcher``."""
        if not self._tracer.is_on:
            return self._dispatcher(layer, x_TH, ids_TK, weights_TK)
        busy_ns_D, tokens_D = self._look(layer)
        self._tracer.begin_layer(layer, len(x_TH))
        try:
            y_TH = self._dispatcher(layer, x_TH, ids_TK, weights_TK)
            busy_now_D, tokens_now_D = self._look(layer)
            self._tracer.write_invocations(busy_now_D - busy_ns_D, tokens_now_D - tokens_D)
            return y_TH
        finally:
            self._tracer.end_layer()

    def _look(self, layer: int) -> tuple[CountArray, CountArray]:
        tokens_D = self._dispatcher.stats.layers.device_tokens_LD[layer]
        return self._board.busy_ns_LD[layer].copy(), tokens_D


def trace_steps(loaded: LoadedModel, runtime: ExpertsRuntime, tracing: Tracing) -> StepTracer:
    """Have a model's layers shown; returns what the step loop must tell of its steps."""
    tracer = StepTracer(tracing)
    attach_runtime(loaded, TracedLayers(runtime.dispatcher, runtime.client.board, tracer))
    return tracer
