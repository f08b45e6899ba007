"""A pool under any sequence of wishes, ends and losses."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from effort import drawn
from moeless.core.clock import ManualClock
from moeless.core.model import FunctionId
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.load_limits import LoadLimits
from moeless.functions.pool.pool import DevicePool, Evict, Load

FUNCTIONS = [FunctionId("m", layer, expert) for layer in range(3) for expert in range(4)]
SIZES = {function: 7 + 5 * (function.expert % 3) for function in FUNCTIONS}
BUDGET = 41
MAX_LOADS = 2

functions = st.sampled_from(FUNCTIONS)
device_states = (State.LOADING, State.WARM, State.BUSY, State.DRAINING)


class Order:
    """Ranks by hand-set numbers; some functions may not leave."""

    def __init__(self):
        self.current = 0
        self.protected = set()

    def moment(self):
        return self.current

    def needed_in(self, function):
        return (function.layer - self.current) % 3

    def waits_since(self, function):
        return 0

    def worth(self, instance):
        return (-float(self.needed_in(instance.function)), instance.idle_since_s)

    def turn_of(self, victim, *, for_load, blocking, leaving):
        if victim.function in self.protected:
            return None
        later = self.needed_in(victim.function) > self.needed_in(for_load)
        return 0 if blocking or later else None


class PoolMachine(RuleBasedStateMachine):
    """The worker's side is the model: what was ordered and has not ended."""

    @initialize(batch_bytes=st.sampled_from([0, 12, 20]))
    def begin(self, batch_bytes):
        self.batch_bytes = batch_bytes
        self.clock = ManualClock()
        self.order = Order()
        self.pool = DevicePool(
            device=0,
            budget_bytes=BUDGET,
            order=self.order,
            limits=LoadLimits(loads=MAX_LOADS, batch_bytes=batch_bytes),
        )
        self.loading = set()
        self.warm = {}
        self.draining = set()

    @rule(function=functions, tokens=st.integers(0, 9), blocking=st.booleans())
    def want(self, function, tokens, blocking):
        self.pool.want(
            function, num_bytes=SIZES[function], load_tokens=float(tokens), blocking=blocking
        )

    @rule(function=functions, blocking=st.booleans())
    def unwant(self, function, blocking):
        self.pool.unwant(function, blocking=blocking)

    @rule(layer=st.integers(0, 2), protected=st.sets(functions, max_size=3))
    def move_on(self, layer, protected):
        self.order.current = layer
        self.order.protected = protected

    @rule()
    def advance(self):
        waiting = [f for f in FUNCTIONS if self.pool.wants(f) and self.is_blocking(f)]
        orders = self.pool.advance(now_s=self.clock.now_s())
        freed = sum(SIZES[o.function] for o in orders if isinstance(o, Evict))
        for order in orders:
            if isinstance(order, Load):
                assert order.function not in self.loading | self.warm.keys() | self.draining
                assert not any(self.pool.wants(f) for f in waiting) or order.function in waiting
                self.loading.add(order.function)
            else:
                assert order.reason == "room"
                assert order.function not in self.order.protected
                del self.warm[order.function]
                self.draining.add(order.function)
        if freed:  # never in part: what drains is enough for the wish that asked
            left = BUDGET - self.pool.held_bytes + sum(SIZES[f] for f in self.draining)
            assert left >= min(SIZES[f] for f in FUNCTIONS if self.pool.wants(f))

    def is_blocking(self, function):
        return self.pool._queue.get(function).blocking

    @rule(data=st.data())
    def end_load(self, data):
        if self.loading:
            function = data.draw(st.sampled_from(sorted(self.loading)))
            self.loading.remove(function)
            if data.draw(st.booleans()):
                self.pool.loaded(function, now_s=self.clock.now_s())
                self.warm[function] = self.clock.now_s()
            else:
                self.pool.failed(function, now_s=self.clock.now_s())

    @rule(data=st.data())
    def end_eviction(self, data):
        if self.draining:
            function = data.draw(st.sampled_from(sorted(self.draining)))
            self.draining.remove(function)
            self.pool.evicted(function, now_s=self.clock.now_s())

    @rule(function=functions)
    def use(self, function):
        self.pool.used(function, finished_s=self.clock.now_s())
        if function in self.warm:
            self.warm[function] = self.clock.now_s()

    @rule(seconds=st.integers(0, 5), keep_s=st.integers(0, 8))
    def expire(self, seconds, keep_s):
        self.clock.advance(seconds)
        now_s = self.clock.now_s()
        expired = self.pool.expired(lambda _f, _idle: float(keep_s), now_s=now_s)
        assert {i.function for i in expired} == {
            f for f, used_s in self.warm.items() if now_s - used_s >= keep_s
        }
        for instance in expired:
            assert len(self.pool.evict(instance.function, reason="keep-alive", now_s=now_s)) == 1
            del self.warm[instance.function]
            self.draining.add(instance.function)

    @rule()
    def lose(self):
        gone = self.pool.lost(now_s=self.clock.now_s())
        assert {i.function for i in gone} == self.loading | self.warm.keys() | self.draining
        self.loading, self.warm, self.draining = set(), {}, set()
        assert not any(self.pool.wants(f) for f in FUNCTIONS)

    @invariant()
    def states_agree(self):
        assert {i.function: i.state for i in self.pool.instances()} == (
            dict.fromkeys(self.loading, State.LOADING)
            | dict.fromkeys(self.warm, State.WARM)
            | dict.fromkeys(self.draining, State.DRAINING)
        )

    @invariant()
    def bytes_are_exact_and_within_the_budget(self):
        held = self.loading | self.warm.keys() | self.draining
        assert self.pool.held_bytes == sum(SIZES[f] for f in held) <= BUDGET

    @invariant()
    def loads_in_flight_are_bounded(self):
        loading_bytes = sum(SIZES[f] for f in self.loading)
        assert len(self.loading) <= MAX_LOADS or loading_bytes <= 2 * self.batch_bytes

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        now_s = self.clock.now_s()
        for function in self.loading:
            self.pool.failed(function, now_s=now_s)
        for function in self.warm:
            self.pool.evict(function, reason="end", now_s=now_s)
        for function in self.draining | self.warm.keys():
            self.pool.evicted(function, now_s=now_s)
        assert self.pool.held_bytes == 0
        assert list(self.pool.instances()) == []


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = drawn(150, steps=40)
