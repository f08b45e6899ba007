"""Expects the first d layers beside a predictor that was trained before and stays as it is.

A recording holds no embeddings, so nothing can be trained for those layers: they are learnt here.
"""

from collections.abc import Callable, Sequence

import torch

from moeless.bootstrap.serving.expectation import expect, expect_first
from moeless.bootstrap.serving.learning_thread import LearningThread
from moeless.functions.token_path.announcer import ExpectedLoad
from moeless.learned.first_layers_learning import FirstLayersLearning
from moeless.learned.gate_predictor import Gate
from moeless.learned.live_options import LiveOptions
from moeless.learned.live_sample import LiveSample
from moeless.learned.trained_predictor import TrainedPredictor


class LiveFirstLayers:
    """Makes the forecasts of a trained predictor, and learns those that it cannot make.

    Args:
        gates: The model's own.
        predictor: Of the other layers.
        options: How it learns.
        share: Part of one core that learning may take, above 0, at most 1.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        predictor: TrainedPredictor,
        *,
        options: LiveOptions | None = None,
        share: float = 0.1,
    ) -> None:
        self._predictor, self._distance = predictor, predictor.distance
        self._thread = LearningThread(self.learn, share=share)
        self._learning = FirstLayersLearning(
            gates[: self._distance], options, pause=self._thread.pause
        )
        self._first_layers = self._learning.first_layers
        self.sample = LiveSample(self._distance + 1)
        self.start: Callable[[], None] = self._thread.start
        self.close: Callable[[], None] = self._thread.close

    def notice(self, layer: int, x_TH: torch.Tensor) -> None:
        """A ``token_path.announcer.Notice``: keeps some rows that the first layers saw."""
        if layer < self._distance:
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

    def learn(self) -> None:
        """Learn from what was noted."""
        with torch.inference_mode():
            tokens_TLH = self.sample.take()
            if tokens_TLH is not None:
                # The embedding was noted first.
                self._learning.learn(tokens_TLH.roll(-1, dims=1))
                self._first_layers = self._learning.first_layers
