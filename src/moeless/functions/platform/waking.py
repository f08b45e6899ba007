"""Loads ahead of a step that finds its model cold, so that the storage never pauses.

A plan is made one layer ahead, or few: enough while experts are warm. After a pause all of them
are gone, and a step would load a layer, compute it, load the next one. So the first layer whose
tokens find nothing warm at all wakes the layers behind it: as many experts of each as this layer
needs, those that used to get most tokens first, one copy of each. They are loaded in the order in
which layers run, behind what tokens wait for. What is still in the queue when its layer's gate has
spoken is dropped: then it is known what is needed.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeless.core.model import FunctionId, ModelSpec
from moeless.core.plan import LoadArray
from moeless.functions.links.board import ModelBoard
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.pool import DevicePool


class WakingModel(Protocol):
    """A model that may be cold."""

    spec: ModelSpec
    function_bytes: int
    board: ModelBoard
    wakes: bool
    """Whether loads may begin ahead of plans."""
    seen_LE: LoadArray
    """Tokens that experts were planned for, summed over all plans."""

    def function(self, layer: int, expert: int) -> FunctionId:
        """The id of one of the model's functions."""
        ...

    def running_layers(self) -> Mapping[int, int]:
        """The layer whose gate spoke last in each engine, by engine."""
        ...


@dataclass(kw_only=True)
class _Wake:
    model: WakingModel
    engine: int
    layer: int
    """How far the step has come: at first the layer whose tokens found nothing warm."""
    wishes_L: dict[int, list[tuple[FunctionId, DevicePool]]] = field(default_factory=dict)
    given_D: Counter[int] = field(default_factory=Counter)
    """Loads that each device has been given, of all layers: a layer waits for the fullest."""


class Waking:
    """Wakes models, one step at a time.

    Args:
        pools: One per device; kept up to date by the owner.
    """

    def __init__(self, pools: Sequence[DevicePool]) -> None:
        self._pools = pools
        self._wakes: dict[tuple[str, int], _Wake] = {}

    def wake(self, model: WakingModel, *, engine: int, layer: int, num_experts: int) -> None:
        """Tokens of an engine miss experts: load ahead if the layer has none at all.

        Args:
            model: The engine's model.
            engine: Whose tokens wait.
            layer: For experts of which layer.
            num_experts: How many.
        """
        if not model.wakes or model.board.warm_LED[layer].any():
            return
        self.drop_passed(model)
        if (model.spec.model_id, engine) in self._wakes:
            return  # the step has woken it already
        wake = _Wake(model=model, engine=engine, layer=layer)
        present_LE: NDArray[np.bool_] = np.logical_or.reduce(model.board.warm_LED, axis=2)
        for instance in itertools.chain.from_iterable(pool.instances() for pool in self._pools):
            function = instance.function
            if function.model == model.spec.model_id and instance.state is State.LOADING:
                present_LE[function.layer, function.expert] = True
        size = model.function_bytes
        up = [
            pool
            for pool in self._pools
            if model.board.device_up_D[pool.device] and pool.budget_bytes >= size
        ]
        room = sum(pool.budget_bytes // size for pool in up) - num_experts
        for ahead in range(layer + 1, model.spec.num_layers):
            if room <= 0:
                break  # more would only push out what is needed earlier
            missing = min(num_experts - int(present_LE[ahead].sum()), room)
            room -= num_experts
            if missing > 0:
                self._wake_layer(wake, ahead, missing, present_LE[ahead], up)
        if wake.wishes_L:
            self._wakes[model.spec.model_id, engine] = wake

    def drop_passed(self, model: WakingModel) -> None:
        """Take back wishes whose layers have had their turn in the step that they were for."""
        for key, wake in list(self._wakes.items()):
            if wake.model is not model:
                continue
            layer = wake.model.running_layers().get(wake.engine, -1)
            over = layer < wake.layer  # another step has begun
            wake.layer = layer
            for ahead in [a for a in wake.wishes_L if over or a <= layer]:
                for function, pool in wake.wishes_L.pop(ahead):
                    pool.unwant(function)
            if not wake.wishes_L:
                del self._wakes[key]

    def forget(self, model: WakingModel, engine: int) -> None:
        """An engine is gone: take back what is still wished for it."""
        wake = self._wakes.pop((model.spec.model_id, engine), None)
        if wake is not None:
            for wishes in wake.wishes_L.values():
                for function, pool in wishes:
                    pool.unwant(function)

    def _wake_layer(
        self,
        wake: _Wake,
        layer: int,
        count: int,
        present_E: NDArray[np.bool_],
        up: Sequence[DevicePool],
    ) -> None:
        model, wishes, given_D = wake.model, [], wake.given_D
        # Below one token: what a plan for the step itself expects goes first.
        share_E = model.seen_LE[layer] / (model.seen_LE[layer].sum() + 1.0)
        absent = np.flatnonzero(~present_E)
        if count < len(absent):
            absent = absent[np.argsort(-share_E[absent], kind="stable")][:count]
        else:
            share_E = np.zeros_like(share_E)  # all of them, in the order in which they are stored
        planned_ED = model.board.planned_LED[layer]
        choices_E = planned_ED[:, [pool.device for pool in up]].astype(bool).sum(axis=1)
        choices_E[choices_E == 0] = len(up)
        # Who has least choice chooses first.
        for expert in absent[np.argsort(choices_E[absent], kind="stable")].tolist():
            function = model.function(layer, expert)
            if any(pool.wants(function) for pool in up):
                continue  # somebody else wants it already, and knows for how long
            planned_D = planned_ED[expert]
            pool = min(up, key=lambda p: (not planned_D[p.device], given_D[p.device], p.device))
            given_D[pool.device] += 1
            pool.want(function, num_bytes=model.function_bytes, load_tokens=float(share_E[expert]))
            wishes.append((function, pool))
        if wishes:
            wake.wishes_L[layer] = wishes
