"""The predictor ``auto``: copied gates that a thread beside the engine keeps re-fitting.

The token path copies the gate inputs of a few tokens and reads one attribute; all else happens in
a thread of the lowest priority, which rests most of the time.
"""

from collections.abc import Callable, Sequence

import torch

from moeless.bootstrap.serving.expectation import expect, expect_first
from moeless.bootstrap.serving.learning_thread import LearningThread
from moeless.core.events import PredictorSwapped
from moeless.core.ports import Clock, EventSink
from moeless.functions.token_path.announcer import ExpectedLoad
from moeless.learned.gate_predictor import Gate
from moeless.learned.live_learning import LiveLearning, Swap
from moeless.learned.live_options import LiveOptions
from moeless.learned.live_sample import LiveSample
from moeless.learned.trained_predictor import TrainedPredictor
from moeless.telemetry.snapshot import PredictorState


class LivePredictor:
    """Makes forecasts, and learns from the gate inputs that they are made from.

    Args:
        gates: The model's own.
        distance: d.
        model: Its id, for events.
        clock: The time, for events.
        sink: Told of each swap.
        tell: Told of each swap in a line of text.
        options: How it learns.
        share: Part of one core that learning may take, above 0, at most 1.

    Raises:
        ConfigError: The model has too few layers for the distance.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        distance: int,
        *,
        model: str,
        clock: Clock,
        sink: EventSink,
        tell: Callable[[str], None] = lambda _: None,
        options: LiveOptions | None = None,
        share: float = 0.1,
    ) -> None:
        self._thread = LearningThread(self.learn, share=share)
        self._learning = LiveLearning(gates, distance, options, pause=self._thread.pause)
        self._model, self._clock, self._sink, self._tell = model, clock, sink, tell
        self._predictor: TrainedPredictor = self._learning.predictor
        self._first_layers = self._learning.first_layers
        self.sample = LiveSample(len(gates) + 1)
        self._distance = distance
        self._swaps = 0
        self.start: Callable[[], None] = self._thread.start
        self.close: Callable[[], None] = self._thread.close

    @property
    def predictor(self) -> TrainedPredictor:
        """The one in use."""
        return self._predictor

    def notice(self, layer: int, x_TH: torch.Tensor) -> None:
        """A ``token_path.announcer.Notice``: keeps a few of a step's rows to learn from."""
        self.sample.note(layer + 1, x_TH)

    def forecast(self, layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
        """A ``token_path.announcer.Forecast``."""
        return expect(self._predictor, layer, x_TH)

    def forecast_first(self, embedding_TH: torch.Tensor) -> dict[int, ExpectedLoad]:
        """What is expected of the first d layers in the step that begins, by layer.

        Args:
            embedding_TH: What enters the model's first layer; not kept.
        """
        return expect_first(self._first_layers, embedding_TH)

    def state(self) -> PredictorState:
        """What it is now."""
        return PredictorState(kind="auto", distance=self._distance, swaps=self._swaps)

    def learn(self) -> Swap | None:
        """Learn from what was noted; returns the swap that this led to, if any."""
        with torch.inference_mode():
            tokens_TLH = self.sample.take()
            if tokens_TLH is None:
                return None
            # The embedding was noted first.
            swap = self._learning.learn(tokens_TLH.roll(-1, dims=1))
            self._first_layers = self._learning.first_layers
        if swap is None:
            return None
        self._predictor = swap.predictor
        self._swaps += 1
        self._sink.emit(
            PredictorSwapped(
                time_s=self._clock.now_s(),
                model=self._model,
                swaps=self._swaps,
                layers=swap.layers,
                fitted_tokens=swap.fitted_tokens,
                judged_tokens=swap.judged_tokens,
                accuracy_before=swap.accuracy_before,
                accuracy_after=swap.accuracy_after,
            )
        )
        self._tell(
            f"predictor replaced ({self._swaps}): {swap.layers} of {len(swap.predictor.models)} "
            f"layers re-fitted to {swap.fitted_tokens:,} live tokens; load accuracy on the "
            f"newest {swap.judged_tokens:,}: {swap.accuracy_before:.3f} before, "
            f"{swap.accuracy_after:.3f} now"
        )
        return swap
