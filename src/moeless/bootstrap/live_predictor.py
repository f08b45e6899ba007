"""The predictor ``auto``: copied gates that a thread beside the engine keeps re-fitting.

The token path copies the gate inputs of a few tokens and reads one attribute; all else happens in
a thread of the lowest priority, which rests most of the time.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from moeless.core.events import PredictorSwapped
from moeless.core.ports import Clock, EventSink
from moeless.functions.announcer import ExpectedLoad
from moeless.functions.compute.background import work_in_background
from moeless.learned.gate_predictor import Gate
from moeless.learned.live_learning import LiveLearning, LiveOptions, Swap
from moeless.learned.live_sample import LiveSample
from moeless.learned.trained_predictor import TrainedPredictor
from moeless.telemetry.snapshot import PredictorState

_log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""Between two looks at the sample."""
_LONGEST_REST_S = 5.0
_LEAST_WORK_S = 0.005
"""Work shorter than this is not rested from at once, but with what follows."""


class _StoppedError(Exception):
    """The thread is to end, in the middle of its work."""


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
        self._learning = LiveLearning(gates, distance, options or LiveOptions(), pause=self._pause)
        self._model, self._clock, self._sink, self._tell = model, clock, sink, tell
        self._predictor: TrainedPredictor = self._learning.predictor
        self._first_layers = self._learning.first_layers
        self.sample = LiveSample(len(gates) + 1)
        self._distance = distance
        self._swaps = 0
        self._rest = 1.0 / share - 1.0
        self._began_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="predictor", daemon=True)

    @property
    def predictor(self) -> TrainedPredictor:
        """The one in use."""
        return self._predictor

    def notice(self, layer: int, x_TH: torch.Tensor) -> None:
        """A ``functions.announcer.Notice``: keeps a few of a step's rows to learn from."""
        self.sample.note(layer + 1, x_TH)

    def forecast(self, layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
        """A ``functions.announcer.Forecast``."""
        return expect(self._predictor, layer, x_TH)

    def forecast_first(self, embedding_TH: torch.Tensor) -> dict[int, ExpectedLoad]:
        """What is expected of the first d layers in the step that begins, by layer.

        Args:
            embedding_TH: What enters the model's first layer; not kept.
        """
        first = self._first_layers
        return {
            layer: ExpectedLoad(load_E, first.errors[layer].mean_at(len(embedding_TH)))
            if layer in first.errors
            else ExpectedLoad(load_E)
            for layer, load_E in first.predict(embedding_TH).items()
        }

    def state(self) -> PredictorState:
        """What it is now."""
        return PredictorState(kind="auto", distance=self._distance, swaps=self._swaps)

    def start(self) -> None:
        """Learn in a thread from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if there is one."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

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

    def _run(self) -> None:
        work_in_background()
        with contextlib.suppress(OSError):
            # Of this thread alone: Linux has a priority for each.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            while not self._stop.wait(_ROUND_S):
                self._began_s = time.perf_counter()
                self.learn()
                self._pause()
        except _StoppedError:
            pass
        except Exception:  # noqa: BLE001 - whatever it was, serving goes on
            _log.exception("learning from live traffic failed; the predictor stays as it is")

    def _pause(self) -> None:
        """Rest so long that work keeps to its share; only in the thread."""
        if threading.current_thread() is not self._thread:
            return
        worked_s = time.perf_counter() - self._began_s
        if worked_s < _LEAST_WORK_S:
            return
        if self._stop.wait(min(_LONGEST_REST_S, self._rest * worked_s)):
            raise _StoppedError
        self._began_s = time.perf_counter()


def expect(predictor: TrainedPredictor, layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
    """What a trained predictor expects of layer + d, and how far off it expects to be.

    Args:
        predictor: The predictor.
        layer: MoE layer that is about to run.
        x_TH: Its gate input [T, H].
    """
    load_E = predictor.predict(layer, x_TH)
    if load_E is None:
        return None
    error = predictor.error(layer)
    if error is None:
        return ExpectedLoad(load_E)
    return ExpectedLoad(load_E, error.mean_at(len(x_TH)))
