"""The function platform: pools, plans and budgets of all models, in one single-threaded object.

It decides; hosts carry out. Whoever runs it (a thread of the engine's process, or the supervisor
process) calls its methods from one thread only and forwards what hosts report. It must not know
torch, sockets or processes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from moeless.core.events import InstanceEvicted, InstanceLoaded, LoadFailed
from moeless.core.model import FunctionId, ModelSpec
from moeless.core.plan import CountArray, Plan, PlanDiff, ReplicaArray, diff_plan
from moeless.core.ports import Clock, EventSink, KeepAlive
from moeless.errors import BudgetError, FunctionError
from moeless.functions.billing import GB, ResidencyMeter
from moeless.functions.board import Board
from moeless.functions.lifecycle import Instance, State
from moeless.functions.pool import DevicePool, Evict, Load
from moeless.telemetry.percentiles import SampleWindow
from moeless.telemetry.snapshot import Timing


class HostPort(Protocol):
    """Carries out orders on one device and reports back to the platform later."""

    def load(self, function: FunctionId) -> None:
        """Begin to load; ends in ``Platform.loaded`` or ``Platform.failed``."""
        ...

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict; ends in ``Platform.evicted``."""
        ...


_MAX_DRAINING = 64
"""Evictions in flight on one device beyond which no idle instance is retired: a host's orders and
our side of its reports must never both pile up."""


@dataclass(kw_only=True)
class _Demand:
    """Tokens wait until every one of these functions is warm somewhere."""

    ticket: int
    layer: int
    missing: set[FunctionId]
    failures: dict[FunctionId, dict[int, str]] = field(default_factory=dict)
    """Why loads failed, per device that tried."""


@dataclass(frozen=True, kw_only=True)
class DemandResult:
    """The end of a demand.

    Args:
        ticket: Which demand.
        error: None when all functions became warm, else the reason why one cannot.
    """

    ticket: int
    error: str | None = None


class ModelPlacement:
    """One model on the platform: its board and its plans. Implements ``core.ports.Placement``.

    Args:
        platform: The platform it lives on.
        spec: The model.
        function_bytes: Bytes that one instance holds on a device.
        board: Shared with the model's engine.
        max_replicas: Replicas of a layer beyond which retired ones leave before their keep-alive
            ends, the longest unused first; None for as many as the devices hold.
    """

    def __init__(
        self,
        platform: "Platform",
        *,
        spec: ModelSpec,
        function_bytes: int,
        board: Board,
        max_replicas: int | None = None,
    ) -> None:
        self.spec = spec
        self.function_bytes = function_bytes
        self.max_replicas = max_replicas
        self.attach(board)
        self._platform = platform
        self.started_s = platform.clock.now_s()
        self.earlier_busy_ns_L: CountArray = np.zeros(spec.num_layers, dtype=np.int64)
        self.cold_starts_L: CountArray = np.zeros(spec.num_layers, dtype=np.int64)
        self.blocking_loads = 0
        self.evictions = 0
        self.failed_loads = 0
        self.plans = 0
        self.plan_s = SampleWindow()
        self.demands: dict[int, _Demand] = {}

    def attach(self, board: Board) -> None:
        """Take the board of a new engine, on which nothing is planned yet."""
        self.board = board
        self.releases_L = [False] * self.spec.num_layers
        self.held_back: set[int] = set()
        self.quota_D: tuple[bytes, CountArray] | None = None
        self._settled: dict[int, tuple[bytes, bool, PlanDiff]] = {}

    def unsettle(self, layer: int | None = None) -> None:
        """What is planned for a layer (None: for all) may not be warm or under way any more."""
        if layer is None:
            self._settled.clear()
        else:
            self._settled.pop(layer, None)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self._platform.pools)

    def alive_ED(self, layer: int) -> ReplicaArray:
        """Warm replicas of a layer, uint8 [E, D]."""
        alive: ReplicaArray = self.board.warm_LED[layer].copy()
        return alive

    def planned_ED(self, layer: int) -> ReplicaArray:
        """Copies in the layer's plan in force, uint8 [E, D]."""
        planned: ReplicaArray = self.board.planned_LED[layer].copy()
        return planned

    def capacity_D(self, layer: int) -> CountArray:
        """Replicas of the layer that each device may hold, int64 [D].

        Where all layers fit side by side every layer gets an equal share of each device. Where
        they do not, layers take turns: a layer may take half of a device while the next one is
        loaded into the other half, or all of it if half would not hold its experts.
        """
        del layer
        return self._platform.layer_quota_D(self)

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
        board.plan_step_L[layer] = plan.step
        replicas = plan.replicas_ED.tobytes()
        known = self._settled.get(layer)
        if known is not None and known[0] == replicas and known[1] == plan.release:
            diff = known[2]  # the same plan again, and all of it warm or under way
        else:
            diff = self._put_in_force(plan)
            if not diff.start:
                again = PlanDiff(layer=layer, kept=diff.kept)
                self._settled[layer] = (replicas, plan.release, again)
        if self.held_back:
            self._platform.release_held_back(self)
        return diff

    def _put_in_force(self, plan: Plan) -> PlanDiff:
        board, layer = self.board, plan.layer
        self.unsettle(layer)
        warm_ED = board.warm_LED[layer] | self._platform.loading_ED(self, layer)
        diff = diff_plan(plan, previous_ED=board.planned_LED[layer], warm_ED=warm_ED)
        board.planned_LED[layer] = plan.replicas_ED
        self.releases_L[layer] = plan.release
        for expert, device in diff.retire:
            self._platform.pools[device].unwant(self.function(layer, expert))
        for expert, device in diff.start:
            if board.device_up_D[device] and plan.load_E[expert] > 0:
                self._platform.pools[device].want(
                    self.function(layer, expert),
                    num_bytes=self.function_bytes,
                    load_tokens=float(plan.load_E[expert]),
                )
        self._platform.release_surplus(self, layer)
        if diff.start:
            self._platform.advance()
        return diff

    def surplus(self, layer: int) -> list[tuple[int, int]]:
        """Warm replicas that need not wait for their keep-alive to end, as (expert, device).

        They are no longer planned and their expert is warm in a planned place: all of those if
        the plan in force says so, else as many as the layer has beyond ``max_replicas``.
        """
        if not self.releases_L[layer] and self.max_replicas is None:
            return []
        warm_ED, planned_ED = self.board.warm_LED[layer], self.board.planned_LED[layer]
        retired_ED = warm_ED > planned_ED
        if not retired_ED.any():
            return []
        served_E = np.logical_and(warm_ED, planned_ED).any(axis=1)
        found = np.argwhere(retired_ED & served_E[:, None])
        if not self.releases_L[layer]:
            assert self.max_replicas is not None
            excess = max(0, int(np.count_nonzero(warm_ED)) - self.max_replicas)
            used_ns = self.board.used_ns_LED[layer][found[:, 0], found[:, 1]]
            found = found[np.argsort(used_ns, kind="stable")[:excess]]
        return [(expert, device) for expert, device in found.tolist()]

    def function(self, layer: int, expert: int) -> FunctionId:
        """The id of one of the model's functions."""
        return FunctionId(self.spec.model_id, layer, expert)

    def report(self) -> dict[str, Any]:
        """Counters of this model as a JSON object; lists of GB·s and starts are by layer."""
        now_s = self._platform.clock.now_s()
        pools = self._platform.pools
        states_D: dict[str, list[int]] = {s.value: [0] * len(pools) for s in State}
        for pool in pools:
            for instance in pool.instances():
                if instance.function.model == self.spec.model_id:
                    states_D[instance.state.value][pool.device] += 1
        budget = sum(pool.budget_bytes for pool in pools)
        busy_ns_L = self.earlier_busy_ns_L + self.board.busy_ns_LD.sum(axis=1)
        reserved = budget * (now_s - self.started_s) / GB
        return {
            "cold_starts_L": self.cold_starts_L.tolist(),
            "blocking_loads": self.blocking_loads,
            "evictions": self.evictions,
            "failed_loads": self.failed_loads,
            "plans": self.plans,
            "plan_s": asdict(Timing.of(self.plan_s)),
            "instances_D": states_D,
            "resident_bytes_D": [pool.held_bytes for pool in pools],
            "budget_bytes_D": [pool.budget_bytes for pool in pools],
            "gb_s_L": {
                "billed": (busy_ns_L * self.function_bytes / (1e9 * GB)).tolist(),
                "resident": self._platform.meters[self.spec.model_id].gb_s_L(now_s=now_s).tolist(),
                # Whole devices belong to no layer more than to another.
                "reserved": [reserved / self.spec.num_layers] * self.spec.num_layers,
            },
        }


class Platform:
    """Pools and models.

    Args:
        budgets_bytes: Budget of each device [D].
        clock: The time.
        keep_alive: How long idle instances stay.
        sink: Receives events.
    """

    def __init__(
        self,
        budgets_bytes: Sequence[int],
        *,
        clock: Clock,
        keep_alive: KeepAlive,
        sink: EventSink,
    ) -> None:
        self.clock = clock
        self.pools = [
            DevicePool(device=d, budget_bytes=b, order=self) for d, b in enumerate(budgets_bytes)
        ]
        self.hosts: dict[int, HostPort] = {}
        self._returning: set[int] = set()
        self.models: dict[str, ModelPlacement] = {}
        self.meters: dict[str, ResidencyMeter] = {}
        self._keep_alive = keep_alive
        self._sink = sink
        self._finished: list[DemandResult] = []
        self._load_began_s: dict[tuple[FunctionId, int], float] = {}

    # Models and devices

    def add_model(
        self,
        spec: ModelSpec,
        *,
        function_bytes: int,
        board: Board,
        max_replicas: int | None = None,
    ) -> ModelPlacement:
        """Register a model; instances left by an earlier engine of the same model stay warm.

        Args:
            spec: The model.
            function_bytes: Bytes that one instance holds on a device.
            board: Shared with the model's engine.
            max_replicas: See ``ModelPlacement``; an earlier engine's value stays.

        Raises:
            BudgetError: The devices cannot hold one layer's experts at once.
            FunctionError: Another model has the same id.
        """
        known = self.models.get(spec.model_id)
        if known is not None:
            return self._rebind(known, spec=spec, function_bytes=function_bytes, board=board)
        slots = sum(pool.budget_bytes // function_bytes for pool in self.pools)
        if slots < spec.num_experts:
            least = -(-spec.num_experts // len(self.pools)) * function_bytes
            raise BudgetError(
                f"the device budgets hold {slots} experts of {function_bytes:,} bytes, but a "
                f"layer of {spec.model_id} has {spec.num_experts}: give each of the "
                f"{len(self.pools)} devices at least {least:,} bytes"
            )
        model = ModelPlacement(
            self,
            spec=spec,
            function_bytes=function_bytes,
            board=board,
            max_replicas=max_replicas,
        )
        board.layer[0] = -1  # no layer has run
        board.device_up_D[:] = [d in self.hosts for d in range(len(self.pools))]
        self.models[spec.model_id] = model
        self.meters[spec.model_id] = ResidencyMeter(spec.num_layers, now_s=self.clock.now_s())
        return model

    def release(self, model: ModelPlacement) -> None:
        """The model's engine is gone.

        Its instances stay until their keep-alive ends or somebody else needs the room.
        """
        model.demands.clear()
        model.board.planned_LED[:] = 0
        model.board.layer[0] = -1  # no layer is being computed: none is protected
        model.unsettle()
        for pool in self.pools:
            pool.unwant_model(model.spec.model_id)

    def _rebind(
        self, model: ModelPlacement, *, spec: ModelSpec, function_bytes: int, board: Board
    ) -> ModelPlacement:
        if model.spec != spec or model.function_bytes != function_bytes:
            raise FunctionError(f"another model is known as {spec.model_id}")
        board.layer[0] = -1
        board.device_up_D[:] = model.board.device_up_D
        board.warm_LED[:] = model.board.warm_LED
        board.used_ns_LED[:] = model.board.used_ns_LED
        model.earlier_busy_ns_L += model.board.busy_ns_LD.sum(axis=1)
        model.attach(board)
        return model

    def device_up(self, device: int, host: HostPort) -> None:
        """A device's host is ready; what is planned for it is loaded."""
        self.hosts[device] = host
        self._returning.discard(device)
        for model in self.models.values():
            model.board.device_generation_D[device] += 1
            model.board.device_up_D[device] = 1
            model.unsettle()
            for layer, expert in np.argwhere(model.board.planned_LED[:, :, device]):
                self.pools[device].want(
                    model.function(int(layer), int(expert)),
                    num_bytes=model.function_bytes,
                )
        self.advance()

    def device_down(self, device: int, *, returns: bool = False) -> None:
        """A device's host is gone with all its instances; waiting tokens are served elsewhere.

        Args:
            device: Which one.
            returns: A new host is on its way: what no other device can hold waits for it.
        """
        self.hosts.pop(device, None)
        if returns:
            self._returning.add(device)
        for model in self.models.values():
            model.board.device_up_D[device] = 0
            model.board.warm_LED[:, :, device] = 0
            model.unsettle()
        for instance in self.pools[device].lost(now_s=self.clock.now_s()):
            self._account(instance, -1)
        self._load_began_s = {k: v for k, v in self._load_began_s.items() if k[1] != device}
        self.advance()

    # The token path's last resort

    def demand(
        self, model: ModelPlacement, *, ticket: int, layer: int, experts: Sequence[int]
    ) -> None:
        """Tokens wait for experts that have no warm replica: load them before all else.

        The end is reported by ``finished``. An engine waits for one demand before it makes the
        next, so an older one that is still open has been given up.
        """
        for older in list(model.demands.values()):
            self._end(model, older, error="given up for a newer demand")
        functions = {model.function(layer, expert) for expert in experts}
        missing = {f for f in functions if not model.board.warm_LED[layer, f.expert].any()}
        model.demands[ticket] = _Demand(ticket=ticket, layer=layer, missing=missing)
        self.advance()

    def finished(self) -> list[DemandResult]:
        """Demands that have ended since the last call."""
        done, self._finished = self._finished, []
        return done

    # Reports of hosts

    def loaded(self, device: int, function: FunctionId) -> None:
        """A load has ended well."""
        now_s = self.clock.now_s()
        instance = self.pools[device].loaded(function, now_s=now_s)
        began_s = self._load_began_s.pop((function, device), now_s)
        model = self.models[function.model]
        model.board.used_ns_LED[function.layer, function.expert, device] = int(now_s * 1e9)
        model.board.warm_LED[function.layer, function.expert, device] = 1
        model.cold_starts_L[function.layer] += 1
        model.blocking_loads += instance.blocking
        for demand in model.demands.values():
            demand.missing.discard(function)
        self._sink.emit(
            InstanceLoaded(
                time_s=now_s,
                model=function.model,
                layer=function.layer,
                expert=function.expert,
                device=device,
                num_bytes=instance.num_bytes,
                load_s=now_s - began_s,
                blocking=instance.blocking,
            )
        )
        self.release_surplus(model, function.layer)
        self.advance()

    def failed(self, device: int, function: FunctionId, *, reason: str) -> None:
        """A load has failed and was rolled back; the plan in force stays."""
        now_s = self.clock.now_s()
        self._account(self.pools[device].failed(function, now_s=now_s), -1)
        self._load_began_s.pop((function, device), None)
        model = self.models[function.model]
        model.failed_loads += 1
        model.unsettle(function.layer)
        for demand in model.demands.values():
            if function in demand.missing:
                demand.failures.setdefault(function, {})[device] = reason
        self._sink.emit(
            LoadFailed(
                time_s=now_s,
                model=function.model,
                layer=function.layer,
                expert=function.expert,
                device=device,
                reason=reason,
            )
        )
        self.advance()

    def evicted(self, device: int, function: FunctionId, *, reason: str) -> None:
        """An eviction has been carried out."""
        now_s = self.clock.now_s()
        self._account(self.pools[device].evicted(function, now_s=now_s), -1)
        model = self.models[function.model]
        model.evictions += 1
        self._sink.emit(
            InstanceEvicted(
                time_s=now_s,
                model=function.model,
                layer=function.layer,
                expert=function.expert,
                device=device,
                reason=reason,
            )
        )
        self.advance()

    # Time passes

    def tick(self) -> None:
        """Retire what has been idle for too long; call it now and then."""
        now_s = self.clock.now_s()
        for model in self.models.values():
            self.release_held_back(model)
        for pool in self.pools:
            self._note_use(pool)
            expired = pool.expired(
                lambda f, idle_s: self._keep_alive.keep_s(f, idle_s=idle_s), now_s=now_s
            )
            for instance in expired[: max(0, _MAX_DRAINING - pool.num_draining)]:
                self._carry_out(
                    pool, pool.evict(instance.function, reason="keep-alive", now_s=now_s)
                )

    def release_surplus(self, model: ModelPlacement, layer: int) -> None:
        """Evict a layer's surplus replicas; later if the layer is being computed now."""
        surplus = model.surplus(layer)
        if not surplus:
            return
        if layer == int(model.board.layer[0]):
            model.held_back.add(layer)
            return
        now_s = self.clock.now_s()
        for expert, device in surplus:
            pool = self.pools[device]
            if pool.num_draining >= _MAX_DRAINING:
                model.held_back.add(layer)
                continue
            function = model.function(layer, expert)
            self._carry_out(pool, pool.evict(function, reason="released", now_s=now_s))

    def release_held_back(self, model: ModelPlacement) -> None:
        """Evict what could not be released when it became surplus."""
        for layer in sorted(model.held_back):
            if layer != int(model.board.layer[0]):
                model.held_back.discard(layer)
                self.release_surplus(model, layer)

    def advance(self) -> None:
        """Issue all loads and evictions that the pools want and can afford now."""
        now_s = self.clock.now_s()
        for model in self.models.values():
            for demand in list(model.demands.values()):
                self._pursue(model, demand)
        for pool in self.pools:
            if pool.device in self.hosts:
                orders = pool.advance(now_s=now_s)
                while orders:
                    self._carry_out(pool, orders)
                    orders = pool.advance(now_s=now_s)

    # Order of loads and evictions (functions.pool.PoolOrder)

    def moment(self) -> object:
        """The layers whose gates spoke last: ``needed_in`` follows from them."""
        return [int(model.board.layer[0]) for model in self.models.values()]

    def needed_in(self, function: FunctionId) -> int:
        """Layers until the function's layer runs next, from 1 to L.

        The layer whose gate spoke last has had its turn: it counts as L.
        """
        model = self.models[function.model]
        ahead = (function.layer - int(model.board.layer[0])) % model.spec.num_layers
        return ahead or model.spec.num_layers

    def worth(self, instance: Instance) -> tuple[float, ...]:
        """Unplanned first; then what is needed last; then second copies; then the idlest."""
        model = self.models[instance.function.model]
        layer, expert = instance.function.layer, instance.function.expert
        warm_D = model.board.warm_LED[layer, expert]
        return (
            float(model.board.planned_LED[layer, expert, instance.device] > 0),
            -float(self.needed_in(instance.function)),
            float(warm_D.sum() <= 1),
            float(model.board.used_ns_LED[layer, expert, instance.device]),
        )

    def may_evict(self, victim: Instance, *, for_load: FunctionId, blocking: bool) -> bool:
        """Whether a victim is needed later than the function that wants its place."""
        model = self.models[victim.function.model]
        layer, expert = victim.function.layer, victim.function.expert
        only_copy = model.board.warm_LED[layer, expert].sum() <= 1
        current = layer == int(model.board.layer[0])
        if blocking:
            return not (current and only_copy)
        if current:
            return False
        planned = bool(model.board.planned_LED[layer, expert, victim.device])
        if not planned and not only_copy:
            return True
        return self.needed_in(victim.function) > self.needed_in(for_load)

    # Quotas

    def layer_quota_D(self, model: ModelPlacement) -> CountArray:
        """Replicas of one layer that each device may hold, int64 [D]; see ``capacity_D``."""
        up = model.board.device_up_D.tobytes()
        if model.quota_D is None or model.quota_D[0] != up:
            model.quota_D = (up, self._compute_layer_quota_D(model))
        return model.quota_D[1].copy()

    def _compute_layer_quota_D(self, model: ModelPlacement) -> CountArray:
        slots_D: CountArray = np.array(
            [p.budget_bytes // model.function_bytes for p in self.pools]
        )
        slots_D[model.board.device_up_D == 0] = 0
        share_D = slots_D // model.spec.num_layers
        if share_D.sum() >= model.spec.num_experts:
            return share_D
        half_D = slots_D // 2
        return half_D if half_D.sum() >= model.spec.num_experts else slots_D

    def loading_ED(self, model: ModelPlacement, layer: int) -> ReplicaArray:
        """1 where an instance of the layer is loading, uint8 [E, D]."""
        loading = np.zeros(model.board.warm_LED.shape[1:], dtype=np.uint8)
        for function, device in self._load_began_s:
            if function.model == model.spec.model_id and function.layer == layer:
                loading[function.expert, device] = 1
        return loading

    # Details

    def _pursue(self, model: ModelPlacement, demand: _Demand) -> None:
        """See to it that each missing function is on its way somewhere; note the demand's end.

        Called after everything that happens: a device that had room may have lost it since.
        """
        if not demand.missing:
            self._end(model, demand)
            return
        free_D = self._free_slots(model, demand.layer)
        for function in sorted(demand.missing):
            loading = (p for p in self.pools if p.state(function) is State.LOADING)
            pool = next(loading, None)
            if pool is None:
                pool = self._choose_pool(model, function, demand, free_D)
                reasons = list(demand.failures.get(function, {}).values())
                # Without room a device is waited for, but not in place of one that failed.
                if pool is None and not reasons and self._returning:
                    continue
                if pool is None or (reasons and free_D[pool.device] <= 0):
                    reason = reasons[0] if reasons else "no device is up that could hold it"
                    where = f"layer {function.layer}, expert {function.expert}"
                    self._end(model, demand, error=f"{where}: {reason}")
                    return
                free_D[pool.device] -= 1
            for other in self.pools:
                if other is not pool:
                    other.unwant(function, blocking=True)
            pool.want(function, num_bytes=model.function_bytes, blocking=True)

    def _end(self, model: ModelPlacement, demand: _Demand, *, error: str | None = None) -> None:
        self._finished.append(DemandResult(ticket=demand.ticket, error=error))
        del model.demands[demand.ticket]
        for function in demand.missing:
            for pool in self.pools:
                pool.unwant(function, blocking=True)

    def _free_slots(self, model: ModelPlacement, layer: int) -> list[int]:
        """Instances that tokens of a layer may wait for on each device [D].

        That is all room but what the layer's own experts need: those that load, and last copies.
        As long as the devices hold a layer's experts between them, there is enough for all.
        """
        only_E = model.board.warm_LED[layer].sum(axis=1) <= 1
        return [
            pool.budget_bytes // model.function_bytes
            - sum(
                i.state is State.LOADING
                or (i.state is not State.DRAINING and bool(only_E[i.function.expert]))
                for i in pool.instances()
                if i.function.layer == layer and i.function.model == model.spec.model_id
            )
            for pool in self.pools
        ]

    def _choose_pool(
        self, model: ModelPlacement, function: FunctionId, demand: _Demand, free_D: list[int]
    ) -> DevicePool | None:
        """Where to load a function that tokens wait for.

        Only where its load has not failed; of those a device with room, if possible the one
        chosen before, then the planned one, then the one with most room.
        """
        planned_D = model.board.planned_LED[function.layer, function.expert]

        def rank(pool: DevicePool) -> tuple[bool, bool, bool, int, int]:
            free = free_D[pool.device]
            planned = bool(planned_D[pool.device])
            return (free <= 0, not pool.wants(function), not planned, -free, pool.device)

        failed = demand.failures.get(function, {})
        able = [
            pool
            for pool in self.pools
            if pool.device in self.hosts
            and pool.device not in failed
            and pool.budget_bytes >= model.function_bytes
        ]
        return min(able, key=rank, default=None)

    def _carry_out(self, pool: DevicePool, orders: list[Load | Evict]) -> None:
        for order in orders:
            host = self.hosts[pool.device]
            model = self.models[order.function.model]
            if isinstance(order, Load):
                self._load_began_s[order.function, pool.device] = self.clock.now_s()
                self._account(pool.instance(order.function), +1)
                host.load(order.function)
            else:
                layer, expert = order.function.layer, order.function.expert
                model.board.warm_LED[layer, expert, pool.device] = 0
                model.unsettle(layer)
                host.evict(order.function, reason=order.reason)

    def _note_use(self, pool: DevicePool) -> None:
        """Bring the pool's view of idle times up to date from the engines' boards."""
        for instance in list(pool.instances()):
            function = instance.function
            board = self.models[function.model].board
            used_s = float(board.used_ns_LED[function.layer, function.expert, pool.device]) / 1e9
            if used_s > instance.last_used_s:
                pool.used(function, finished_s=used_s)

    def _account(self, instance: Instance, sign: int) -> None:
        """An instance has begun (+1) or ceased (-1) to hold its bytes."""
        self.meters[instance.function.model].add_bytes(
            instance.function.layer, sign * instance.num_bytes, now_s=self.clock.now_s()
        )
