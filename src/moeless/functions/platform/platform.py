"""The function platform: pools, plans and budgets of all models, in one single-threaded object.

It decides; hosts carry out. Whoever runs it (a thread of the engine's process, or the supervisor
process) calls its methods from one thread only and forwards what hosts report. It must not know
torch, sockets or processes.
"""

import math
from collections.abc import Sequence

import numpy as np

from moeless.core.events import InstanceEvicted, LoadFailed
from moeless.core.memory_share import NO_SHARE, MemoryShare
from moeless.core.model import FunctionId, ModelSpec
from moeless.core.ports import Clock, EventSink, KeepAlive
from moeless.errors import FunctionError
from moeless.functions.accounts.billing import ResidencyMeter
from moeless.functions.links.board import EngineBoard, ModelBoard
from moeless.functions.platform.demands import DemandDesk, DemandResult
from moeless.functions.platform.departures import Departures
from moeless.functions.platform.evacuation import Evacuation
from moeless.functions.platform.host_orders import HostOrders
from moeless.functions.platform.host_port import HostPort
from moeless.functions.platform.idle_instances import IdleInstances
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.platform.model_shares import ModelShares
from moeless.functions.platform.need_order import NeedOrder
from moeless.functions.platform.platform_news import PlatformNews
from moeless.functions.platform.speed_intake import SpeedIntake
from moeless.functions.pool.load_limits import ONE_BY_ONE, LoadLimits
from moeless.functions.pool.load_retries import LoadRetries
from moeless.functions.pool.pool import DevicePool


class Platform:
    """Pools and models.

    Args:
        budgets_bytes: Budget of each device [D]; 0 for one that is not in use.
        clock: The time.
        keep_alive: How long idle instances stay.
        sink: Receives events.
        linger_s: How long idle instances of a model without engines stay at most.
        limits: Of loads under way on each device.
    """

    def __init__(
        self,
        budgets_bytes: Sequence[int],
        *,
        clock: Clock,
        keep_alive: KeepAlive,
        sink: EventSink,
        linger_s: float = math.inf,
        limits: LoadLimits = ONE_BY_ONE,
    ) -> None:
        self.clock = clock
        self.models: dict[str, ModelPlacement] = {}
        self.pools: list[DevicePool] = []
        self._returning: set[int] = set()
        self._sharing = ModelShares(self.models, self.pools)
        self.slots_D = self._sharing.slots_D
        self.check_budgets = self._sharing.check_budgets
        self.speeds = SpeedIntake(
            self.models, self.pools, num_devices=len(budgets_bytes), clock=clock
        )
        self._desk = DemandDesk(
            self.models, self.pools, returning=self._returning, shares=self._sharing.shares
        )
        order = NeedOrder(self.models, waiters=self._desk, shares=self._sharing.shares)
        self.pools += [
            DevicePool(device=device, budget_bytes=num_bytes, order=order, limits=limits)
            for device, num_bytes in enumerate(budgets_bytes)
        ]
        self.in_use = self._find_in_use()
        """Devices that have a budget, up or not: plans are made for those."""
        self.orders = HostOrders(self.models, clock=clock, limits=limits)
        self._departures = Departures(
            self.pools,
            self.orders,
            evacuation=Evacuation(self.pools, self.models, order=order, want=self.want),
            idle=IdleInstances(self.models, keep_alive, clock=clock, linger_s=linger_s),
            clock=clock,
        )
        self.loading_ED = self.orders.loading_ED
        self.release_surplus = self._departures.release_surplus
        self.release_held_back = self._departures.release_held_back
        self._news = PlatformNews(sink)
        self._retries = LoadRetries()

    # Models and devices

    def add_model(
        self,
        spec: ModelSpec,
        *,
        function_bytes: int,
        board: ModelBoard,
        max_replicas: int | None = None,
        share: MemoryShare = NO_SHARE,
        keep_alive: KeepAlive | None = None,
    ) -> ModelPlacement:
        """Register a model, which no engine uses yet.

        Args:
            spec: The model.
            function_bytes: Bytes that one instance holds on a device.
            board: Shared with the model's engines; kept for as long as the model is known.
            max_replicas: See ``ModelPlacement``.
            share: See there.
            keep_alive: See there.

        Raises:
            BudgetError: The devices cannot hold one layer's experts at once, or what models are
                guaranteed does not go together.
            FunctionError: A model has the same id.
        """
        if spec.model_id in self.models:
            raise FunctionError(f"a model is known as {spec.model_id}")
        self._sharing.check(spec, function_bytes, share)
        model = ModelPlacement(
            self,
            spec=spec,
            function_bytes=function_bytes,
            board=board,
            meter=ResidencyMeter(spec.num_layers, now_s=self.clock.now_s()),
            max_replicas=max_replicas,
            share=share,
            keep_alive=keep_alive,
        )
        board.device_up_D[:] = [device in self.orders.hosts for device in range(len(self.pools))]
        self.models[spec.model_id] = model
        return model

    def invite(
        self, model: ModelPlacement, *, share: MemoryShare, keep_alive: KeepAlive | None
    ) -> None:
        """The first engine of a known model is about to join: it says what the model needs.

        Args:
            model: The model, which no engine uses.
            share: What it is guaranteed from now on.
            keep_alive: How long its idle instances stay; None for the platform's rule.

        Raises:
            BudgetError: What models are guaranteed does not go together.
        """
        assert not model.engines
        self._sharing.check(model.spec, model.function_bytes, share)
        model.share, model.keep_alive = share, keep_alive

    def join(self, model: ModelPlacement, engine: int, board: EngineBoard) -> None:
        """An engine begins to use a model.

        Args:
            model: Which one.
            engine: A number that no other engine has.
            board: The engine's board.
        """
        model.join(engine, board)
        self._sharing.review()

    def leave(self, model: ModelPlacement, engine: int) -> None:
        """An engine is gone, and with it what it demanded; others of its model go on.

        After the last one the model's instances stay until their keep-alive ends or somebody else
        needs the room. The caller goes on with ``advance``: what the engine waited for stands in
        nobody's way now, and what has to leave its device is asked for elsewhere anew.
        """
        self._desk.drop(model, engine)
        model.leave(engine)
        if model.engines:
            return
        model.share = NO_SHARE
        self._sharing.review()
        model.board.planned_LED[:] = 0
        model.unsettle()
        for pool in self.pools:
            pool.unwant_model(model.spec.model_id)

    def device_up(self, device: int, host: HostPort) -> None:
        """A device's host is ready; what is planned for it is loaded."""
        self.orders.hosts[device] = host
        self._returning.discard(device)
        self._retries.forget_device(device)
        self._desk.note_host(device)
        for model in self.models.values():
            model.board.device_generation_D[device] += 1
            if device not in model.barred:
                self._open_device(model, device)
        self.advance()

    def bar(self, model: ModelPlacement, device: int, *, reason: str) -> None:
        """A device that is up, or soon will be, cannot serve a model; others it can.

        Args:
            model: Which model.
            device: Which device.
            reason: Told to tokens that wait for the model while no device can serve it.
        """
        model.barred[device] = reason
        if model.board.device_up_D[device]:
            model.board.device_up_D[device] = 0
            self.pools[device].unwant_model(model.spec.model_id)
        self.advance()

    def unbar(self, model: ModelPlacement, device: int) -> None:
        """A device can serve a model again."""
        if model.barred.pop(device, None) is not None and device in self.orders.hosts:
            self._open_device(model, device)
            self.advance()

    def _open_device(self, model: ModelPlacement, device: int) -> None:
        model.board.device_up_D[device] = 1
        model.unsettle()
        for layer, expert in np.argwhere(model.board.planned_LED[:, :, device]):
            self.want(model, int(layer), int(expert), device)

    def want(
        self,
        model: ModelPlacement,
        layer: int,
        expert: int,
        device: int,
        *,
        load_tokens: float = 0.0,
        spare: bool = False,
    ) -> None:
        """Have a replica made warm, unless its load failed a moment ago or nothing fits there."""
        function, pool = model.function(layer, expert), self.pools[device]
        size, now_s = model.function_bytes, self.clock.now_s()
        if size <= pool.budget_bytes and not self._retries.must_wait(
            function, device, now_s=now_s
        ):
            pool.want(function, num_bytes=size, load_tokens=load_tokens, spare=spare)

    def device_down(self, device: int, *, returns: bool = False) -> None:
        """A device's host is gone with all its instances; waiting tokens are served elsewhere.

        Args:
            device: Which one.
            returns: A new host is on its way: what no other device can hold waits for it.
        """
        self.orders.hosts.pop(device, None)
        self._returning.discard(device)
        if returns:
            self._returning.add(device)
        for model in self.models.values():
            model.board.device_up_D[device] = 0
            model.board.warm_LED[:, :, device] = 0
            model.unsettle()
        for instance in self.pools[device].lost(now_s=self.clock.now_s()):
            self.orders.note_freed(instance)
        self.orders.forget_device(device)
        self.advance()

    def set_budget(self, device: int, num_bytes: int) -> None:
        """Give a device another budget from now on.

        What is held beyond it leaves; last copies do so once their function is warm elsewhere.

        Args:
            device: Which one.
            num_bytes: Its budget; 0 takes it out of use, and out of all plans.
        """
        self.pools[device].resize(num_bytes)
        for model in self.models.values():
            model.quota_D = None
            model.unsettle()
            if not num_bytes:
                model.board.planned_LED[:, :, device] = 0
        self.in_use = self._find_in_use()
        self._sharing.review()
        self.advance()

    def _find_in_use(self) -> tuple[int, ...]:
        return tuple(pool.device for pool in self.pools if pool.budget_bytes)

    # The token path's last resort

    def demand(
        self,
        model: ModelPlacement,
        *,
        ticket: int,
        layer: int,
        experts: Sequence[int],
        engine: int = 0,
    ) -> None:
        """Tokens wait for experts that have no warm replica: load them before all else.

        The end is reported by ``finished``. An engine waits for one demand before it makes the
        next, so an older one of the same engine that is still open has been given up.
        """
        now_s = self.clock.now_s()
        self._news.demanded(model.spec.model_id, layer=layer, experts=experts, time_s=now_s)
        self._desk.open(
            model, engine=engine, ticket=ticket, layer=layer, experts=experts, now_s=now_s
        )
        self.advance()

    @property
    def events_lost(self) -> int:
        """Events of all models that did not get where they should be kept."""
        return self._news.lost

    @property
    def has_demands(self) -> bool:
        """Whether tokens of some engine wait for loads."""
        return any(model.demands for model in self.models.values())

    def finished(self) -> list[DemandResult]:
        """Demands that have ended since the last call."""
        return self._desk.finished()

    # Reports of hosts

    def loaded(self, device: int, *functions: FunctionId) -> None:
        """Loads have ended well."""
        now_s = self.clock.now_s()
        for function in functions:
            self._note_loaded(device, function, now_s)
        for model, layer in dict.fromkeys((f.model, f.layer) for f in functions):
            self.release_surplus(self.models[model], layer)
        self.advance()

    def _note_loaded(self, device: int, function: FunctionId, now_s: float) -> None:
        instance = self.pools[device].loaded(function, now_s=now_s)
        began_s, busy_s = self.orders.end_load(function, device)
        model = self.models[function.model]
        model.loads.note(
            device, num_bytes=instance.num_bytes, took_s=now_s - began_s, busy_s=busy_s
        )
        place = function.layer, function.expert, device
        model.earlier_used_ns_LED[place] = int(now_s * 1e9)
        model.board.warm_LED[place] = 1
        model.cold_starts_L[function.layer] += 1
        model.blocking_loads += instance.blocking
        self._retries.note_success(function, device)
        self._desk.note_loaded(model, function)
        self._news.loaded(instance, began_s=began_s, time_s=now_s)

    def failed(
        self, device: int, function: FunctionId, *, reason: str, elsewhere: bool = False
    ) -> None:
        """A load has failed and was rolled back; the plan in force stays.

        Args:
            device: Where.
            function: What.
            reason: Why.
            elsewhere: Whether another device, or a new host of this one, may do better.
        """
        now_s = self.clock.now_s()
        self.orders.note_freed(self.pools[device].failed(function, now_s=now_s))
        began_s, _ = self.orders.end_load(function, device)
        model = self.models[function.model]
        model.failed_loads[device] += 1
        model.unsettle(function.layer)
        self._retries.note_failure(function, device, now_s=now_s)
        self._desk.note_failed(
            model, function, device, reason=reason, elsewhere=elsewhere, began_s=began_s
        )
        self._news.ended(LoadFailed, function, device, time_s=now_s, reason=reason)
        self.advance()

    def evicted(self, device: int, function: FunctionId, *, reason: str) -> None:
        """An eviction has been carried out."""
        now_s = self.clock.now_s()
        self.orders.note_freed(self.pools[device].evicted(function, now_s=now_s))
        model = self.models[function.model]
        model.evictions += 1
        self._news.ended(InstanceEvicted, function, device, time_s=now_s, reason=reason)
        self.advance()

    # Time passes

    def tick(self) -> None:
        """Retire what has been idle for too long, try failed loads again; call it now and then."""
        now_s = self.clock.now_s()
        self._try_again(now_s)
        for model in self.models.values():
            self.release_held_back(model)
            model.account.settle()
        self._sharing.look()
        self._departures.retire_idle()

    def _try_again(self, now_s: float) -> None:
        for function, device in self._retries.due(now_s=now_s):
            model, place = self.models[function.model], (function.layer, function.expert, device)
            board = model.board
            if board.planned_LED[place] and board.device_up_D[device]:
                if not board.warm_LED[place]:
                    self.want(model, *place)
            else:
                self._retries.note_success(function, device)  # nobody wants it any more
        self.advance()

    def advance(self) -> None:
        """Issue all loads and evictions that the pools want and can afford now."""
        for model in self.models.values():
            self._desk.pursue(model)
        self._departures.evacuate()
        for pool in self.pools:
            if pool.device in self.orders.hosts:
                self.orders.advance(pool)
