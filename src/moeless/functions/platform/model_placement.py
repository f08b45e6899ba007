"""One model on the platform: its board, its engines, its plans in force and its counters.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moeless.core.memory_share import NO_SHARE, MemoryShare
from moeless.core.model import FunctionId, ModelSpec
from moeless.core.plan import (
    CountArray,
    LoadArray,
    Plan,
    PlanDiff,
    ReplicaArray,
    SpeedArray,
    diff_plan,
)
from moeless.core.ports import Clock, KeepAlive
from moeless.functions.accounts.billing import ResidencyMeter
from moeless.functions.accounts.load_meter import LoadMeter
from moeless.functions.accounts.model_account import ModelAccount
from moeless.functions.links.board import EngineBoard, ModelBoard
from moeless.functions.platform.demands import Demand
from moeless.functions.pool.pool import DevicePool
from moeless.functions.sharing.activity import Activity
from moeless.functions.sharing.layer_quota import layer_quota_D
from moeless.telemetry.percentiles import SampleWindow


class HeededSpeedSource(Protocol):
    """Says what plans are to heed of devices' speeds."""

    @property
    def speed_D(self) -> SpeedArray | None:
        """Relative speeds [D]; None where all are equal."""
        ...


class PlacementPlatform(Protocol):
    """What a model needs of the platform it lives on."""

    @property
    def clock(self) -> Clock:
        """The time."""
        ...

    @property
    def pools(self) -> Sequence[DevicePool]:
        """One per device."""
        ...

    def slots_D(self, model: "ModelPlacement") -> CountArray:
        """Instances that a model may plan for on each device, int64 [D]."""
        ...

    @property
    def events_lost(self) -> int:
        """Events that did not get where they should be kept."""
        ...

    @property
    def in_use(self) -> tuple[int, ...]:
        """Devices that plans are made for, ascending."""
        ...

    @property
    def speeds(self) -> "HeededSpeedSource":
        """Says how fast devices are."""
        ...

    def loading_ED(self, model: "ModelPlacement", layer: int) -> ReplicaArray:
        """1 where an instance of the layer is loading, uint8 [E, D]."""
        ...

    def release_surplus(self, model: "ModelPlacement", layer: int) -> None:
        """Evict a layer's surplus replicas; later if the layer is being computed now."""
        ...

    def release_held_back(self, model: "ModelPlacement") -> None:
        """Evict what could not be released when it became surplus."""
        ...

    def want(
        self,
        model: "ModelPlacement",
        layer: int,
        expert: int,
        device: int,
        *,
        load_tokens: float = 0.0,
        spare: bool = False,
    ) -> None:
        """Have a planned replica made warm, unless its load failed a moment ago."""
        ...

    def advance(self) -> None:
        """Issue all loads and evictions that the pools want and can afford now."""
        ...


class ModelPlacement:
    """One model on the platform: its board and its plans. Implements ``core.ports.Placement``.

    Args:
        platform: The platform it lives on.
        spec: The model.
        function_bytes: Bytes that one instance holds on a device.
        board: Shared with the model's engines.
        meter: Bytes over time.
        max_replicas: Replicas of a layer beyond which retired ones leave before their keep-alive
            ends, the longest unused first; None for as many as the devices hold.
        share: What it is guaranteed while it has engines.
        keep_alive: How long its idle instances stay; None for the platform's rule.
    """

    def __init__(
        self,
        platform: PlacementPlatform,
        *,
        spec: ModelSpec,
        function_bytes: int,
        board: ModelBoard,
        meter: ResidencyMeter,
        max_replicas: int | None = None,
        share: MemoryShare = NO_SHARE,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self.meter = meter
        self.spec = spec
        self.function_bytes = function_bytes
        self.board = board
        self.max_replicas = max_replicas
        self.engines: dict[int, EngineBoard] = {}
        """Engines that are there, by number."""
        self.speaker: tuple[int, int] | None = None
        """The engine for whose step plans are being made, and how far the control loop's count of
        steps is ahead of that engine's; None where plans are for all engines."""
        self.share = share
        self.keep_alive = keep_alive
        self.activity = Activity(self.engines, clock=platform.clock)
        self.left_s = platform.clock.now_s()
        """When the last engine left."""
        self._platform = platform
        self.earlier_busy_ns_L: CountArray = np.zeros(spec.num_layers, dtype=np.int64)
        self.earlier_used_ns_LED: CountArray = np.zeros(board.warm_LED.shape, dtype=np.int64)
        self.cold_starts_L: CountArray = np.zeros(spec.num_layers, dtype=np.int64)
        self.loads = LoadMeter(len(platform.pools))
        self.blocking_loads = 0
        self.evictions = 0
        self.failed_loads: Counter[int] = Counter()  # by device
        self.wakes = True
        """Whether tokens that find a layer without any warm replica wake those behind it."""
        self.seen_LE: LoadArray = np.zeros((spec.num_layers, spec.num_experts))
        """Tokens that experts were planned for, summed over all plans."""
        self.plans = 0
        self.plan_s = SampleWindow()
        self.demands: dict[int, Demand] = {}
        self.barred: dict[int, str] = {}
        """Devices that cannot serve the model although they are up, with the reason."""
        self.releases_L = [False] * spec.num_layers
        self.held_back: set[int] = set()
        self.quota_D: tuple[bytes, CountArray] | None = None
        self._slots_D: CountArray | None = None
        self._settled: dict[int, tuple[bytes, bool, PlanDiff]] = {}
        self._made_for_step_L: dict[int, CountArray] = {}
        self.account = ModelAccount(
            spec.model_id, self, pools=platform.pools, meter=meter, clock=platform.clock
        )

    def join(self, engine: int, board: EngineBoard) -> None:
        """An engine begins to use the model.

        Args:
            engine: A number that no other engine of the platform has.
            board: Its board.
        """
        board.layer[0] = -1  # no layer has run
        self.engines[engine] = board
        self.account.join(engine)
        self.activity.note_traffic()
        self._made_for_step_L[engine] = np.zeros(self.spec.num_layers, dtype=np.int64)

    def leave(self, engine: int) -> None:
        """An engine is gone; what it used and was billed for stays on record."""
        self.account.leave(engine)
        board = self.engines.pop(engine)
        self.activity.forget(engine)
        self.left_s = self._platform.clock.now_s()
        del self._made_for_step_L[engine]
        self.earlier_busy_ns_L += board.busy_ns_LD.sum(axis=1)
        np.maximum(self.earlier_used_ns_LED, board.used_ns_LED, out=self.earlier_used_ns_LED)

    def running_layers(self) -> dict[int, int]:
        """The layer whose gate spoke last in each engine, by engine; -1 between steps."""
        return {engine: int(board.layer[0]) for engine, board in self.engines.items()}

    def is_running(self, layer: int) -> bool:
        """Whether some engine computes the layer now."""
        return any(int(board.layer[0]) == layer for board in self.engines.values())

    def last_used_ns(self, layer: int, expert: int, device: int) -> int:
        """When any engine last used an instance, or it became warm; monotonic clock."""
        place = layer, expert, device
        used_ns = int(self.earlier_used_ns_LED[place])
        for board in self.engines.values():
            used_ns = max(used_ns, int(board.used_ns_LED[place]))
        return used_ns

    def is_busy(self) -> bool:
        """Whether it has requests now."""
        return bool(self.demands) or self.activity.any_busy()

    def busy_ns_L(self, engine: int | None = None) -> CountArray:
        """How long each layer's instances have computed, int64 [L].

        Args:
            engine: For whom; None for all engines, also those that have left.
        """
        if engine is not None:
            own_L: CountArray = self.engines[engine].busy_ns_LD.sum(axis=1)
            return own_L
        busy_ns_L: CountArray = self.earlier_busy_ns_L.copy()
        for board in self.engines.values():
            busy_ns_L += board.busy_ns_LD.sum(axis=1)
        return busy_ns_L

    def unsettle(self, layer: int | None = None) -> None:
        """What is planned for a layer (None: for all) may not be warm or under way any more."""
        if layer is None:
            self._settled.clear()
        else:
            self._settled.pop(layer, None)
        # A plan that was to stand for longer is looked at again from each engine's next step on.
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        for engine, board in self.engines.items():
            plan_step_L = board.plan_step_L[layers]
            soon_L = np.maximum(self._made_for_step_L[engine][layers], board.step[0])
            np.minimum(plan_step_L, soon_L, out=plan_step_L)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self._platform.pools)

    @property
    def devices_in_use(self) -> tuple[int, ...]:
        """Devices that plans are made for, ascending."""
        return self._platform.in_use

    def alive_ED(self, layer: int) -> ReplicaArray:
        """Warm replicas of a layer, uint8 [E, D]."""
        alive: ReplicaArray = self.board.warm_LED[layer].copy()
        return alive

    def planned_ED(self, layer: int) -> ReplicaArray:
        """Copies in the layer's plan in force, uint8 [E, D]."""
        planned: ReplicaArray = self.board.planned_LED[layer].copy()
        return planned

    def capacity_D(self, layer: int) -> CountArray:
        """Replicas of the layer that each device may hold, int64 [D]; see ``layer_quota_D``."""
        del layer
        up = self.board.device_up_D.tobytes()
        if self.quota_D is None or self.quota_D[0] != up:
            slots_D = self._platform.slots_D(self)
            slots_D[self.board.device_up_D == 0] = 0
            quota_D = layer_quota_D(
                slots_D, num_layers=self.spec.num_layers, num_experts=self.spec.num_experts
            )
            self.quota_D = (up, quota_D)
        return self.quota_D[1].copy()

    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that devices have shown of late [D]; None where all are equal."""
        return self._platform.speeds.speed_D

    def follow_slots(self, slots_D: CountArray) -> None:
        """Others leave more or less of the devices than before: plans are to follow."""
        if self._slots_D is None or not np.array_equal(self._slots_D, slots_D):
            self._slots_D = slots_D
            self.quota_D = None
            self.unsettle()

    def apply(self, plan: Plan, *, decision_s: float) -> PlanDiff:
        """Put a plan in force and start what is missing.

        Experts without expected tokens keep their replicas, but none is started for them. Of an
        expert that has several copies on a device one instance is loaded, and counted.

        Args:
            plan: The plan.
            decision_s: How long the planner took, for the record.
        """
        self.plans += 1
        self.plan_s.add(decision_s)
        board, layer = self.board, plan.layer
        board.plan_load_LE[layer] = plan.load_E
        self.seen_LE[layer] += plan.load_E
        spoken_for = self._spoken_for(plan)
        for engine, step in spoken_for:
            self._made_for_step_L[engine][layer] = step
        replicas = plan.replicas_ED.tobytes()
        known = self._settled.get(layer)
        if known is not None and known[0] == replicas and known[1] == plan.release:
            diff = known[2]  # the same plan again, and all of it warm or under way
        else:
            diff = self._put_in_force(plan)
            if not diff.start:
                again = PlanDiff(layer=layer, kept=diff.kept)
                self._settled[layer] = (replicas, plan.release, again)
        for engine, step in spoken_for:
            stands = 0 if diff.start else plan.steps - 1
            self.engines[engine].plan_step_L[layer] = step + stands
        if self.held_back:
            self._platform.release_held_back(self)
        return diff

    def _spoken_for(self, plan: Plan) -> list[tuple[int, int]]:
        """Engines that a plan is made for, each with its own step."""
        if self.speaker is None:
            return [(engine, plan.step) for engine in self.engines]
        engine, ahead = self.speaker
        return [(engine, plan.step - ahead)]

    def _put_in_force(self, plan: Plan) -> PlanDiff:
        board, layer = self.board, plan.layer
        self.unsettle(layer)
        warm_ED = board.warm_LED[layer] | self._platform.loading_ED(self, layer)
        diff = diff_plan(plan, previous_ED=board.planned_LED[layer], warm_ED=warm_ED)
        board.planned_LED[layer] = plan.replicas_ED
        self.releases_L[layer] = plan.release
        for expert, device in diff.retire:
            self._platform.pools[device].unwant(self.function(layer, expert))
        if diff.start:
            self._begin_loads(plan, diff, warm_ED.any(axis=1))
        self._platform.release_surplus(self, layer)
        if diff.start:
            self._platform.advance()
        return diff

    def _begin_loads(self, plan: Plan, diff: PlanDiff, present_E: NDArray[np.bool_]) -> None:
        """Have what a plan is missing loaded, one copy of each expert before any second one."""
        pools, given = self._platform.pools, Counter[int]()
        for expert, places in itertools.groupby(diff.start, key=lambda place: place[0]):
            devices = [device for _, device in places if self.board.device_up_D[device]]
            load_tokens = float(plan.load_E[expert])
            if load_tokens <= 0 or not devices:
                continue
            function = self.function(plan.layer, expert)
            first = next((p.device for p in pools if p.wants(function, first=True)), None)
            if first is None and not present_E[expert]:
                first = min(devices, key=lambda device: (given[device], device))
                given[first] += 1
            for device in devices:
                self._platform.want(
                    self,
                    plan.layer,
                    expert,
                    device,
                    load_tokens=load_tokens,
                    spare=device != first,
                )

    def surplus(self, layer: int) -> list[tuple[int, int]]:
        """Warm replicas that need not wait for their keep-alive to end, as (expert, device).

        They are no longer planned and their expert is warm in a planned place: all of those if
        the plan in force says so, else as many as the layer has beyond ``max_replicas``. A device
        that holds more than its budget is no such place: what it has was loaded elsewhere so that
        it can leave.
        """
        if not self.releases_L[layer] and self.max_replicas is None:
            return []
        warm_ED, planned_ED = self.board.warm_LED[layer], self.board.planned_LED[layer]
        retired_ED = warm_ED > planned_ED
        if not retired_ED.any():
            return []
        stays_D = np.array([pool.free_bytes >= 0 for pool in self._platform.pools])
        served_E = np.logical_and(warm_ED, planned_ED)[:, stays_D].any(axis=1)
        found = np.argwhere(retired_ED & served_E[:, None])
        if not self.releases_L[layer]:
            assert self.max_replicas is not None
            excess = max(0, int(np.count_nonzero(warm_ED)) - self.max_replicas)
            used_ns = [self.last_used_ns(layer, expert, device) for expert, device in found]
            found = found[np.argsort(used_ns, kind="stable")[:excess]]
        return [(expert, device) for expert, device in found.tolist()]

    def function(self, layer: int, expert: int) -> FunctionId:
        """The id of one of the model's functions."""
        return FunctionId(self.spec.model_id, layer, expert)

    def report(self, engine: int | None = None) -> dict[str, Any]:
        """Counters as a JSON object; see ``ModelAccount``. Lost events are those of all models."""
        return self.account.report(engine) | {"events_lost": self._platform.events_lost}
