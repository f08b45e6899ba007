"""The token path of a recorded run, gone once more.

It finds on the board what it found in the run, and does with it what it does: fall back, demand,
split, and have computed again what had left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import TraceError
from moeless.functions.links.segment_status import NOT_WARM, OK
from moeless.functions.token_path.open_work import OpenWork
from moeless.simulator.recorded_control import RecordedControl
from moeless.simulator.token_path import BoolArray, TokenPath


@dataclass(kw_only=True, eq=False)
class RecordedPath(TokenPath):
    """A token path that looks when it did in the run. Waiting takes no time of the simulation.

    Args:
        control: The supervisor's side.
    """

    control: RecordedControl

    def _run_layer(
        self,
        step: int,
        layer: int,
        count_E: CountArray,
        expected_LE: NDArray[np.float64] | None,
    ) -> Iterator[float | None]:
        del expected_LE  # the record says when somebody was told
        clock, recording, control = self.loop.clock, self.recording, self.control
        work, looks, seconds = OpenWork(count_E, self.board.warm_LED.shape[2]), 0, 0.0
        used_ED = np.zeros(self.board.warm_LED.shape[1:], dtype=np.bool_)
        while work.is_open:
            look = control.see(step, layer, looks, work.open_E)
            if not looks:
                self._note_warm(step, layer)
            looks += 1
            missing = np.flatnonzero((work.open_E > 0) & ~look.usable_ED.any(axis=1))
            ready_E = work.open_E.copy()
            ready_E[missing] = 0
            if len(missing):
                work.count_try(layer)
                control.demand(layer, missing.tolist())
            share_ED = self._split(layer, ready_E, look.usable_ED.copy())
            tokens_D = np.add.reduce(share_ED, axis=0)
            recording.device_tokens_SLD[step, layer] += tokens_D
            run_s, busy_s = self.timer.measure(share_ED, tokens_D)
            recording.busy_s_SL[step, layer] += busy_s
            seconds += run_s
            used_ED |= share_ED > 0
            segments = work.segments(share_ED)
            status = _status_of(segments, look.left_ED)
            work.close(segments, status, complete=not len(missing))
            if len(missing):
                control.await_demand()
        if looks < len(control.times.looks[step, layer].looks):
            raise TraceError(f"step {step}, layer {layer}: the run looked more than {looks} times")
        recording.layer_s_SL[step, layer] = seconds
        control.note_used(step, layer, used_ED)
        yield clock.time_s + seconds + self.misc_s


def _status_of(
    segments: Sequence[NDArray[np.int32]], left_ED: BoolArray
) -> list[NDArray[np.uint8]]:
    """What became of each segment, per device."""
    return [
        np.where(left_ED[segments_n3[:, 0], device], NOT_WARM, OK).astype(np.uint8)
        for device, segments_n3 in enumerate(segments)
    ]
