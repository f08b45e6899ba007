"""A platform whose hosts answer late, in any order, fail, die and come back.

Two engines share its model: each runs its own layers, waits for its own demands, and comes and
goes as it likes.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from effort import drawn
from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan, diff_plan
from moeless.functions.links.board import EngineBoard, ModelBoard
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.load_limits import LoadLimits
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

LAYERS, EXPERTS = 3, 4
BYTES = 10
KEEP_S = 20.0
STUCK_S = 10.0  # an engine that has stood still for so long without waiting keeps nothing

SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=2,
    expert=ExpertShape(hidden=1, intermediate=1),
)

layers = st.integers(0, LAYERS - 1)
engines = st.integers(0, 1)
expert_sets = st.sets(st.integers(0, EXPERTS - 1), min_size=1)


class Host:
    """Keeps orders until the machine has them end."""

    def __init__(self, machine, device):
        self.machine, self.device = machine, device
        self.orders = []

    def load(self, *functions):
        assert not self.loading.union(self.draining).intersection(functions)
        assert len(functions) * BYTES <= max(BYTES, self.machine.batch_bytes)
        self.orders.append(("load", functions, ""))

    def evict(self, function, *, reason):
        assert function not in self.loading | self.draining
        machine, board = self.machine, self.machine.board
        running = [e for e, b in machine.boards.items() if function.layer == b.layer[0]]
        stuck = {e for e in running if machine.model.activity.still_s(e) >= STUCK_S}
        if reason == "room" and not board.warm_LED[function.layer, function.expert].any():
            # Only from engines that wait themselves, and not for as long as somebody else.
            waiting = [ticket for ticket in machine.open if ticket[0] not in running]
            for engine in running:
                own = [ticket for ticket in machine.open if ticket[0] == engine]
                assert own or engine in stuck, "it was the last copy of one that computes"
                assert not own or any(machine.opened[w] < machine.opened[own[-1]] for w in waiting)
        if reason == "released":
            assert not running, "its layer is being computed"
            planned_D = board.planned_LED[function.layer, function.expert]
            assert not planned_D[self.device]
            assert planned_D[board.warm_LED[function.layer, function.expert] > 0].any()
        self.orders.append(("evict", function, reason))

    @property
    def loading(self):
        return {f for kind, functions, _ in self.orders if kind == "load" for f in functions}

    @property
    def draining(self):
        return {function for kind, function, _ in self.orders if kind == "evict"}


class PlatformMachine(RuleBasedStateMachine):
    @initialize(
        extra=st.integers(0, 8),
        num_devices=st.integers(1, 3),
        max_replicas=st.none() | st.integers(EXPERTS, EXPERTS + 3),
        batch_bytes=st.sampled_from([0, 2 * BYTES, 3 * BYTES + 1]),
        data=st.data(),
    )
    def begin(self, extra, num_devices, max_replicas, batch_bytes, data):
        self.max_replicas = max_replicas
        self.batch_bytes = batch_bytes
        slots = [0] * num_devices
        for _ in range(EXPERTS + extra):
            slots[data.draw(st.integers(0, num_devices - 1))] += 1
        odd_bytes = data.draw(st.integers(0, BYTES - 1))
        self.slots = slots
        self.clock = ManualClock(1.0)
        self.platform = Platform(
            [s * BYTES + odd_bytes for s in slots],
            clock=self.clock,
            keep_alive=FixedKeepAlive(KEEP_S),
            sink=MemorySink(limit=10),
            limits=LoadLimits(batch_bytes=batch_bytes),
        )
        self.hosts = {}
        self.tickets = 0
        self.open = {}  # (engine, ticket) -> functions not seen warm since it was made
        self.opened = {}  # (engine, ticket) -> its place among all demands
        self.boards = {}
        self.given_up = set()
        self.failed = {}  # functions -> how many demands there had been when a load failed last
        self.results = {}
        self.byte_s_L = np.zeros(LAYERS)
        shape = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_devices": len(self.slots)}
        self.shape, self.shared = shape, bytearray(ModelBoard.num_bytes(**shape))
        self.model = self.platform.add_model(
            SPEC,
            function_bytes=BYTES,
            board=ModelBoard(self.shared, **shape),
            max_replicas=self.max_replicas,
        )
        self.board = self.model.board
        for engine in (0, 1):
            self.join(engine)
        for device in range(num_devices):
            self.come_up(device)

    def join(self, engine):
        own = bytearray(EngineBoard.num_bytes(**self.shape))
        self.boards[engine] = EngineBoard(own, **self.shape)
        self.platform.join(self.model, engine, self.boards[engine])
        self.note()

    def come_up(self, device):
        self.hosts[device] = Host(self, device)
        self.platform.device_up(device, self.hosts[device])
        self.note()

    def note(self):
        """Take notice of what became warm and of which demands ended."""
        for functions in self.open.values():
            functions -= {f for f in functions if self.board.warm_LED[f.layer, f.expert].any()}
        for result in self.platform.finished():
            missing = self.open.pop((result.engine, result.ticket))
            if result.error is None:
                assert not missing
            elif "newer" not in result.error:
                able = any(self.slots[device] for device in self.hosts)
                opened = self.opened[result.engine, result.ticket]
                assert not able or any(self.failed.get(f, 0) >= opened for f in missing)
            self.results[result.engine, result.ticket] = result.error

    @rule(engine=engines, layer=layers)
    def run_layer(self, engine, layer):
        """An engine that goes on without waiting has given up what it demanded."""
        self.given_up |= {ticket for ticket in self.open if ticket[0] == engine}
        self.boards[engine].layer[0] = layer

    @rule(layer=layers, release=st.booleans(), data=st.data())
    def plan(self, layer, release, data):
        replicas_ED = np.zeros((EXPERTS, len(self.slots)), dtype=np.uint8)
        load_E = np.zeros(EXPERTS)
        for expert in range(EXPERTS):
            load_E[expert] = data.draw(st.integers(0, 3))
            for device in data.draw(st.sets(st.integers(0, len(self.slots) - 1))):
                free = self.slots[device] - int(replicas_ED[:, device].sum())
                if free > 0:
                    replicas_ED[expert, device] = data.draw(st.integers(1, min(free, 3)))
        self.last_plan = Plan(
            step=1, layer=layer, replicas_ED=replicas_ED, load_E=load_E, release=release
        )
        self.platform_apply(self.last_plan)

    @precondition(lambda self: hasattr(self, "last_plan"))
    @rule()
    def plan_the_same_again(self):
        self.platform_apply(self.last_plan)

    def platform_apply(self, plan):
        before = self.fresh_diff(plan)
        assert self.model.apply(plan, decision_s=0.0) == before
        assert (self.board.planned_LED[plan.layer] == plan.replicas_ED).all()
        self.note()

    def fresh_diff(self, plan):
        """What the plan changes, worked out from the pools."""
        have_ED = self.board.warm_LED[plan.layer].copy()
        for pool in self.platform.pools:
            for instance in pool.instances():
                if instance.state is State.LOADING and instance.function.layer == plan.layer:
                    have_ED[instance.function.expert, pool.device] = 1
        return diff_plan(plan, previous_ED=self.board.planned_LED[plan.layer], warm_ED=have_ED)

    @rule(engine=engines, layer=layers, experts=expert_sets)
    def demand(self, engine, layer, experts):
        self.tickets += 1
        self.boards[engine].layer[0] = layer
        key = engine, 100 - self.tickets  # engines number their own: they may be alike
        # What is warm when it is asked for does not count, even if it has to leave at once.
        cold = [e for e in experts if not self.board.warm_LED[layer, e].any()]
        self.open[key] = {self.model.function(layer, e) for e in cold}
        self.opened[key] = self.tickets
        self.platform.demand(
            self.model, engine=engine, ticket=key[1], layer=layer, experts=sorted(experts)
        )
        self.note()

    @rule(data=st.data(), succeeds=st.booleans())
    def answer(self, data, succeeds):
        busy = [d for d, host in sorted(self.hosts.items()) if host.orders]
        if not busy:
            return
        device = data.draw(st.sampled_from(busy))
        orders = self.hosts[device].orders
        kind, what, reason = orders.pop(data.draw(st.integers(0, len(orders) - 1)))
        if kind == "evict":
            self.platform.evicted(device, what, reason=reason)
        else:
            failing = set() if succeeds else data.draw(st.sets(st.sampled_from(what), min_size=1))
            for function in sorted(failing):
                self.failed[function] = self.tickets
                self.platform.failed(device, function, reason="the disk is gone")
            self.end_loads(device, [function for function in what if function not in failing])
        self.note()

    def end_loads(self, device, loaded):
        for functions in self.open.values():  # they may have to leave again at once
            functions.difference_update(loaded)
        if loaded:
            self.platform.loaded(device, *loaded)

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def die(self, data):
        device = data.draw(st.sampled_from(sorted(self.hosts)))
        del self.hosts[device]
        self.platform.device_down(device)
        self.note()

    @rule(data=st.data())
    def come_back(self, data):
        down = [d for d in range(len(self.slots)) if d not in self.hosts]
        if down:
            self.come_up(data.draw(st.sampled_from(down)))

    @rule(
        engine=engines,
        seconds=st.integers(0, 15),
        layer=layers,
        expert=st.integers(0, EXPERTS - 1),
    )
    def pass_time(self, engine, seconds, layer, expert):
        for pool in self.platform.pools:
            for instance in pool.instances():
                self.byte_s_L[instance.function.layer] += BYTES * seconds
        self.clock.advance(seconds)
        warm_D = self.board.warm_LED[layer, expert] > 0
        used_ns_D = self.boards[engine].used_ns_LED[layer, expert]
        used_ns_D[warm_D] = int(self.clock.now_s() * 1e9)
        self.platform.tick()
        self.note()

    @rule(engine=engines)
    def leave_and_join_again(self, engine):
        warm_LED, planned_LED = self.board.warm_LED.copy(), self.board.planned_LED.copy()
        theirs = {ticket: missing for ticket, missing in self.open.items() if ticket[0] != engine}
        self.platform.leave(self.model, engine)
        del self.boards[engine]
        self.open = theirs
        self.note()
        assert (self.board.warm_LED == warm_LED).all()
        assert (self.board.planned_LED == planned_LED).all(), "the other one's plans stay"
        self.platform.advance()
        self.join(engine)

    @rule()
    def all_leave_and_join_again(self):
        for engine in (0, 1):
            self.platform.leave(self.model, engine)
        self.open.clear()
        self.note()
        assert not self.board.planned_LED.any()
        self.platform.advance()
        for engine in (0, 1):
            self.join(engine)

    def go_on(self):
        """Engines that compute end their step; whether that gives hosts something to do."""
        waiting = {ticket[0] for ticket in self.open.keys() - self.given_up}
        for engine, board in self.boards.items():
            if engine not in waiting:
                board.layer[0] = -1
        self.platform.advance()
        self.note()
        return any(host.orders for host in self.hosts.values())

    @rule(data=st.data())
    def let_hosts_finish(self, data):
        """No order fails, and engines that compute end their step: whoever waits is served."""
        for _ in range(1000):
            if not any(host.orders for host in self.hosts.values()) and not self.go_on():
                break
            self.answer(data, succeeds=True)
        else:
            raise AssertionError("orders never end")
        if sum(self.slots[d] for d in self.hosts) >= EXPERTS:
            assert self.open.keys() <= self.given_up, f"demands wait for ever: {self.open}"
        if not self.hosts:
            assert not self.open

    @invariant()
    def the_warm_table_is_what_pools_hold(self):
        warm_LED = np.zeros_like(self.board.warm_LED)
        for pool in self.platform.pools:
            for instance in pool.instances():
                if instance.state is State.WARM:
                    warm_LED[instance.function.layer, instance.function.expert, pool.device] = 1
        assert (warm_LED == self.board.warm_LED).all()
        up = [int(d in self.hosts) for d in range(len(self.slots))]
        assert self.board.device_up_D.tolist() == up

    @invariant()
    def no_budget_is_exceeded(self):
        for pool in self.platform.pools:
            held = sum(i.num_bytes for i in pool.instances())
            assert pool.held_bytes == held <= pool.budget_bytes
            if pool.device not in self.hosts:
                assert held == 0

    @invariant()
    def resident_time_is_billed_to_the_layer_that_holds_the_bytes(self):
        byte_s_L = np.array(self.model.report()["gb_s_L"]["resident"]) * 1e9
        np.testing.assert_allclose(byte_s_L, self.byte_s_L, rtol=1e-9, atol=1e-9)

    @invariant()
    def hosts_and_pools_agree_on_what_is_under_way(self):
        for device, host in self.hosts.items():
            states = {i.function: i.state for i in self.platform.pools[device].instances()}
            assert host.loading == {f for f, s in states.items() if s is State.LOADING}
            assert host.draining == {f for f, s in states.items() if s is State.DRAINING}

    @invariant()
    def surplus_stays_only_while_it_must(self):
        for layer in range(LAYERS):
            if layer not in self.model.held_back:
                assert self.model.surplus(layer) == []

    @invariant()
    def quotas_are_within_what_is_up(self):
        quota_D = self.model.capacity_D(0)
        assert all(q == 0 for d, q in enumerate(quota_D) if d not in self.hosts)
        assert (quota_D <= np.array(self.slots)).all()

    def teardown(self):
        if not hasattr(self, "hosts"):
            return
        for device in range(len(self.slots)):
            if device not in self.hosts:
                self.come_up(device)
        while any(host.orders for host in self.hosts.values()) or self.go_on():
            for device, host in self.hosts.items():
                while host.orders:
                    kind, what, reason = host.orders.pop(0)
                    if kind == "load":
                        self.end_loads(device, what)
                    else:
                        self.platform.evicted(device, what, reason=reason)
                    self.note()
        assert self.open.keys() <= self.given_up
        assert self.results.keys() <= self.opened.keys()
        for device in list(self.hosts):
            self.platform.device_down(device)
        assert [pool.held_bytes for pool in self.platform.pools] == [0] * len(self.slots)


TestPlatformMachine = PlatformMachine.TestCase
TestPlatformMachine.settings = drawn(150, steps=40)
