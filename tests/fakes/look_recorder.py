"""Writes down what a real token path found on its board, and what came of it."""

import time
from dataclasses import dataclass

import numpy as np

from moeless.functions.links.segment_status import FAILED, NOT_WARM
from moeless.simulator.recorded_times import LayerLooks, Look


@dataclass(kw_only=True)
class OpenLook:
    began_s: float
    looked_s: float | None = None
    usable_ED: np.ndarray | None = None
    left_ED: np.ndarray | None = None
    answered_s: float | None = None


class LookRecorder:
    """Stands between a dispatcher and its client, splitter and invoker."""

    def __init__(self, runtime, splitter):
        self.client = _Passing(runtime.client, demand=self._demand, await_demand=self._await)
        self.invoker = _Passing(runtime.invoker, begin=self._begin, finish=self._finish)
        self.looks = {}
        self.shares = []
        self._client, self._invoker, self._splitter = runtime.client, runtime.invoker, splitter
        self._open = []

    def run(self, dispatcher, step, layer, *args):
        """Have a layer computed, and keep what was seen meanwhile."""
        self._open = [OpenLook(began_s=time.monotonic())]
        y_TH = dispatcher(layer, *args)
        self._open.pop()
        used_ns = int(self._client.board.used_ns_LED[layer].max())
        self.looks[step, layer] = LayerLooks(
            looks=[Look(**vars(look)) for look in self._open], used_ns=used_ns
        )
        return y_TH

    def split(self, count_E, replicas_ED):
        look = self._open[-1]
        look.looked_s = look.looked_s or time.monotonic()
        look.usable_ED = replicas_ED > 0
        share_ED = self._splitter.split(count_E, replicas_ED)
        self.shares.append(share_ED.copy())
        return share_ED

    def _demand(self, **wanted):
        self._open[-1].looked_s = time.monotonic()
        return self._client.demand(**wanted)

    def _await(self, ticket, **limits):
        self._client.await_demand(ticket, **limits)
        self._open[-1].began_s = time.monotonic()

    def _begin(self, layer, *, segments, **rows):
        self._segments = segments
        self._invoker.begin(layer, segments=segments, **rows)

    def _finish(self):
        answer, look = self._invoker.finish(), self._open[-1]
        look.answered_s = time.monotonic()
        look.left_ED = np.zeros_like(look.usable_ED)
        for device, status_n in enumerate(answer.status):
            assert not (status_n == FAILED).any()
            experts = self._segments[device][status_n == NOT_WARM, 0]
            look.left_ED[experts, device] = True
        self._open.append(OpenLook(began_s=look.answered_s))
        return answer


class _Passing:
    """All of somebody, but for a few methods."""

    def __init__(self, whole, **others):
        self._whole = whole
        vars(self).update(others)

    def __getattr__(self, name):
        return getattr(self._whole, name)
