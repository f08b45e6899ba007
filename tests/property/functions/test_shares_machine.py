"""Models of different sizes on the same devices, each with a share, that come, work and sleep."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from effort import drawn
from moeless.core.clock import ManualClock
from moeless.core.memory_share import MemoryShare
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.errors import BudgetError
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.lifecycle import State
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

LAYERS, EXPERTS, DEVICES = 2, 3, 2
BYTES = {"small": 7, "large": 10, "third": 10}

models = st.sampled_from(sorted(BYTES))
layers = st.integers(0, LAYERS - 1)


class Host:
    """Keeps orders until the machine has them end."""

    def __init__(self, machine, device):
        self.machine, self.device = machine, device
        self.orders = []

    def load(self, function):
        self.orders.append(("load", function, ""))

    def evict(self, function, *, reason):
        self.orders.append(("evict", function, reason))


class SharesMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(3, 9), data=st.data())
    def begin(self, slots, data):
        self.clock = ManualClock(1000.0)
        self.budget = slots * 10
        self.platform = Platform(
            [self.budget] * DEVICES,
            clock=self.clock,
            keep_alive=FixedKeepAlive(500.0),
            sink=MemorySink(limit=10),
            linger_s=10.0,
        )
        self.boards, self.engine, self.step = {}, {}, 0
        self.open, self.tickets, self.joined = {}, 0, 0
        self.hosts = [Host(self, device) for device in range(DEVICES)]
        for device, host in enumerate(self.hosts):
            self.platform.device_up(device, host)
        for pool in self.platform.pools:
            self.watch(pool)
        self.taken = 0
        for name in BYTES:
            self.join(name, data)

    def join(self, name, data):
        """A model attaches, unless what it asks for cannot be promised."""
        share = MemoryShare(fraction=data.draw(st.sampled_from([0.0, 0.2, 0.35, 0.5])))
        shape = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_devices": DEVICES}
        board = Board.in_process(**shape)
        model = self.platform.models.get(name)
        try:
            if model is None:
                spec = ModelSpec(
                    model_id=name,
                    family="mixtral",
                    layer_ids=tuple(range(LAYERS)),
                    num_experts=EXPERTS,
                    top_k=1,
                    expert=ExpertShape(hidden=1, intermediate=1),
                )
                model = self.platform.add_model(
                    spec, function_bytes=BYTES[name], board=board, share=share
                )
            else:
                self.platform.invite(model, share=share, keep_alive=None)
        except BudgetError:
            return
        self.joined += 1
        self.boards[name], self.engine[name] = board, self.joined
        self.platform.join(model, self.joined, board)

    def model(self, name):
        return self.platform.models[name]

    def watch(self, pool):
        """Have a pool's choices of what makes room looked at."""
        make_room = pool._make_room

        def watched(function, *arguments, **options):
            orders = make_room(function, *arguments, **options)
            for order in orders or []:
                self.check(pool, owner=order.function.model, loader=function.model)
            return orders

        pool._make_room = watched

    def check(self, pool, *, owner, loader):
        """Nobody falls below its share for another's sake while it has traffic."""
        if owner == loader:
            return
        self.taken += 1
        model = self.model(owner)
        guaranteed = model.share.bytes_of(self.budget) // model.function_bytes
        held = sum(
            i.function.model == owner and i.state is not State.DRAINING for i in pool.instances()
        )
        assert held >= guaranteed or model.activity.is_asleep(), "it lost what it is guaranteed"

    def move(self, name, layer):
        self.step += 1
        self.boards[name].step[0], self.boards[name].layer[0] = self.step, layer

    @rule(name=models, layer=layers, data=st.data())
    def plan(self, name, layer, data):
        """A model plans within what it may have."""
        if name not in self.engine:
            return
        self.move(name, (layer - 1) % LAYERS)
        model = self.model(name)
        capacity_D = model.capacity_D(layer)
        assert (capacity_D >= 0).all()
        assert capacity_D.sum() >= EXPERTS, "one replica of each expert is always allowed"
        replicas_ED = np.zeros((EXPERTS, DEVICES), dtype=np.uint8)
        for expert in range(EXPERTS):
            for device in data.draw(st.sets(st.integers(0, DEVICES - 1))):
                if replicas_ED[:, device].sum() < capacity_D[device]:
                    replicas_ED[expert, device] = 1
        plan = Plan(step=self.step, layer=layer, replicas_ED=replicas_ED, load_E=np.ones(EXPERTS))
        model.apply(plan, decision_s=0.0)
        self.note()

    @rule(name=models, layer=layers, experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1))
    def begin_layer(self, name, layer, experts):
        self.demand(name, layer, experts)

    def demand(self, name, layer, experts):
        if name not in self.engine or name in self.open:
            return
        self.move(name, layer)
        self.tickets += 1
        self.open[name] = self.tickets
        self.platform.demand(
            self.model(name),
            engine=self.engine[name],
            ticket=self.tickets,
            layer=layer,
            experts=sorted(experts),
        )
        self.note()

    def note(self):
        for result in self.platform.finished():
            name = next(n for n, ticket in self.open.items() if ticket == result.ticket)
            assert self.engine[name] == result.engine
            assert result.error is None
            del self.open[name]

    @rule(name=models)
    def work(self, name):
        """A model runs two steps; each layer has as many copies as it may have."""
        for layer in [*range(LAYERS)] * 2:
            if name not in self.engine or name in self.open:
                return
            self.move(name, layer)
            capacity_D = self.model(name).capacity_D(layer)
            replicas_ED = np.zeros((EXPERTS, DEVICES), dtype=np.uint8)
            for device, capacity in enumerate(capacity_D):
                replicas_ED[: min(capacity, EXPERTS), device] = 1
            plan = Plan(
                step=self.step, layer=layer, replicas_ED=replicas_ED, load_E=np.ones(EXPERTS)
            )
            self.model(name).apply(plan, decision_s=0.0)
            self.demand(name, layer, range(EXPERTS))
            self.let_hosts_finish()

    @rule(data=st.data())
    def answer(self, data):
        busy = [host for host in self.hosts if host.orders]
        if busy:
            self.end_order(data.draw(st.sampled_from(busy)))

    def end_order(self, host):
        kind, function, reason = host.orders.pop(0)
        if kind == "load":
            self.platform.loaded(host.device, function)
        else:
            self.platform.evicted(host.device, function, reason=reason)
        self.note()

    @rule(seconds=st.sampled_from([0.25, 2.0, 5.0, 100.0]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.platform.tick()
        self.note()

    @rule(name=models)
    def leave(self, name):
        if name in self.engine:
            self.open.pop(name, None)
            self.platform.leave(self.model(name), self.engine.pop(name))
            self.platform.advance()
            self.note()

    @rule(name=models, data=st.data())
    def come_back(self, name, data):
        if name not in self.engine:
            self.join(name, data)

    @rule()
    def all_go_on(self):
        self.let_hosts_finish()

    def let_hosts_finish(self):
        """Engines that compute end their step: whoever waits is served."""
        for _ in range(1000):
            for name in self.engine:
                if name not in self.open:
                    self.boards[name].layer[0] = -1
            self.platform.advance()
            busy = [host for host in self.hosts if host.orders]
            if not busy:
                break
            self.end_order(busy[0])
        else:
            raise AssertionError("orders never end")
        assert not self.open, "tokens wait for ever"

    @invariant()
    def no_budget_is_exceeded_and_every_byte_is_somebodys(self):
        for pool in self.platform.pools:
            held = sum(i.num_bytes for i in pool.instances())
            assert pool.held_bytes == held <= pool.budget_bytes
            for name in self.platform.models:
                own = [i for i in pool.instances() if i.function.model == name]
                live = sum(i.num_bytes for i in own if i.state is not State.DRAINING)
                assert pool.bytes_of(name) == live

    @invariant()
    def guarantees_go_together(self):
        for pool in self.platform.pools:
            promised = [m.share.bytes_of(pool.budget_bytes) for m in self.platform.models.values()]
            assert sum(promised) <= pool.budget_bytes

    @invariant()
    def what_engines_used_is_never_more_than_what_the_model_used(self):
        for name, engine in self.engine.items():
            model = self.model(name)
            total, own = model.report(), model.report(engine)
            for key in ("blocking_loads", "evictions", "plans"):
                assert 0 <= own[key] <= total[key]
            for key in ("resident", "reserved"):
                assert 0 <= sum(own["gb_s_L"][key]) <= sum(total["gb_s_L"][key]) + 1e-12


TestSharesMachine = SharesMachine.TestCase
TestSharesMachine.settings = drawn(120, steps=40)
