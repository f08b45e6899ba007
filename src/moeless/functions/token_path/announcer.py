"""What the token path tells the control loop: loads that came true, and loads to be expected.

It writes them on the board and rings; nobody waits for an answer. Where a plan is in force for
several steps nothing is said until it ends, and nothing is predicted: that saves the time of both
sides, which on a machine without a core to spare is the experts' time. Needs torch.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moeless.core.plan import CountArray, LoadArray
from moeless.functions.links.client import PlatformClient
from moeless.functions.token_path.token_path_stats import TokenPathStats


class ExpectedLoad(NamedTuple):
    """What a look-ahead predictor says.

    Args:
        load_E: Expected tokens of each expert [E].
        error: Share of them that it expects to have misplaced; NaN where it does not know.
    """

    load_E: LoadArray | CountArray
    error: float = math.nan


Forecast = Callable[[int, torch.Tensor], ExpectedLoad | None]
"""From (layer, gate input [T, H]) to the expected load of layer + d, None past the last."""

FirstForecast = Callable[[torch.Tensor], Mapping[int, ExpectedLoad]]
"""From what enters the model's first layer [T, H] to the expected loads of layers that no gate of
the step sees ahead."""

Notice = Callable[[int, torch.Tensor], None]
"""Told (layer, gate input [T, H]) of every layer, and before them (-1, what enters the model's
first layer); must keep neither."""


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """What makes forecasts on the token path.

    Args:
        distance: d, layers that are looked ahead; 0 where nothing is forecast.
        forecast: What is expected of later layers; called only where somebody plans by it.
        forecast_first: The same of the first layers.
        notice: Learns from every step.
    """

    distance: int = 0
    forecast: Forecast | None = None
    forecast_first: FirstForecast | None = None
    notice: Notice | None = None


class LoadAnnouncer:
    """Says of each layer and step what somebody plans by.

    Args:
        client: The platform.
        look_ahead: What makes forecasts.
        stats: Told how long that took, and how right forecasts were.
    """

    def __init__(
        self, client: PlatformClient, look_ahead: LookAhead, *, stats: TokenPathStats
    ) -> None:
        self._client = client
        self._board = client.board
        self._num_layers = len(client.board.plan_step_L)
        self._look_ahead = look_ahead
        self._stats = stats
        self._pending: tuple[int, CountArray, torch.Tensor, int] | None = None

    def take(self, layer: int, count_E: CountArray, x_TH: torch.Tensor, *, step: int) -> None:
        """Take what is to be announced of a layer.

        Args:
            layer: MoE layer.
            count_E: Tokens of each expert.
            x_TH: The gate's input.
            step: The engine's iteration.
        """
        self._pending = (layer, count_E, x_TH, step)

    def announce(self) -> None:
        """Say what load came true and what is expected, unless it was said or nobody asks."""
        if self._pending is None:
            return
        layer, count_E, x_TH, step = self._pending
        self._pending = None
        if not self._client.wants_loads:
            return
        board = self._board
        if self._look_ahead.notice is not None:
            self._look_ahead.notice(layer, x_TH)
        ahead = layer + self._look_ahead.distance
        looks = (
            self._look_ahead.forecast is not None
            and ahead < self._num_layers
            and bool(board.plan_step_L[ahead] < step)
        )
        if looks:
            self._forecast(layer, ahead, x_TH, step)
        self._judge_prediction(layer, count_E, step)
        tells = bool(board.plan_step_L[layer] <= step or board.forecast_step_L[layer] == step)
        if tells:
            board.post_actual(layer, count_E, step=step)
        if looks or tells:
            self._client.announce_loads()

    def announce_first(self, embedding_TH: torch.Tensor, *, step: int) -> None:
        """Say what is expected of layers that no gate of the step can see ahead.

        Args:
            embedding_TH: What enters the model's first layer [T, H].
            step: The iteration that begins.
        """
        look_ahead, board = self._look_ahead, self._board
        if not self._client.wants_loads:
            return
        if look_ahead.notice is not None:
            look_ahead.notice(-1, embedding_TH)
        if look_ahead.forecast_first is None:
            return
        if (board.plan_step_L[: look_ahead.distance] >= step).all():
            return
        expected = look_ahead.forecast_first(embedding_TH)
        for layer, load in expected.items():
            board.post_forecast(layer, load.load_E, error=load.error, step=step)
        if expected:
            self._client.announce_loads()

    def _forecast(self, layer: int, ahead: int, x_TH: torch.Tensor, step: int) -> None:
        assert self._look_ahead.forecast is not None
        began_s = time.perf_counter()
        expected = self._look_ahead.forecast(layer, x_TH)
        if expected is not None:
            self._board.post_forecast(ahead, expected.load_E, error=expected.error, step=step)
        self._stats.record_forecast(time.perf_counter() - began_s)

    def _judge_prediction(self, layer: int, count_E: CountArray, step: int) -> None:
        """Hold what was expected of the layer in this step against what came true.

        Where nothing was forecast it is what the plan for this step was made for, if that was in
        time: what somebody expected who looks back.
        """
        board = self._board
        if board.forecast_step_L[layer] == step:
            self._stats.record_accuracy(layer, board.forecast_LE[layer], count_E)
        elif board.plan_step_L[layer] == step:
            self._stats.record_accuracy(layer, board.plan_load_LE[layer], count_E)
