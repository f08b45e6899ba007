"""The pool of one device, example by example."""

import pytest

from moeless.core.model import FunctionId
from moeless.errors import BudgetError, TransitionError
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.load_limits import LoadLimits
from moeless.functions.pool.pool import DevicePool, Evict, Load


def fn(expert, layer=0):
    return FunctionId("m", layer, expert)


class Order:
    """Needs low layers first; misses high experts least; keeps what is protected."""

    def __init__(self):
        self.protected = set()

    def moment(self):
        return 0

    def needed_in(self, function):
        return function.layer

    def waits_since(self, function):
        return 0

    def worth(self, instance):
        return (-instance.function.expert,)

    def turn_of(self, victim, *, for_load, blocking, leaving):
        return None if victim.function in self.protected else 0


@pytest.fixture
def order():
    return Order()


@pytest.fixture
def pool(order):
    return DevicePool(device=0, budget_bytes=40, order=order, limits=LoadLimits(loads=2))


def loads(orders):
    return [o.function for o in orders if isinstance(o, Load)]


def make_warm(pool, *functions, at_s=0.0):
    for function in functions:
        pool.want(function, num_bytes=10)
        assert loads(pool.advance(now_s=at_s)) == [function]
        pool.loaded(function, now_s=at_s)


def test_no_more_loads_are_in_flight_than_allowed(pool):
    for expert in range(4):
        pool.want(fn(expert), num_bytes=10)
    assert loads(pool.advance(now_s=0)) == [fn(0), fn(1)]
    assert pool.advance(now_s=0) == []
    pool.loaded(fn(0), now_s=1)
    assert loads(pool.advance(now_s=1)) == [fn(2)]


def test_what_tokens_wait_for_comes_first_then_the_sooner_layer_then_the_larger_load(order):
    pool = DevicePool(device=0, budget_bytes=100, order=order, limits=LoadLimits(loads=9))
    pool.want(fn(0, layer=2), num_bytes=10, load_tokens=9)
    pool.want(fn(1, layer=1), num_bytes=10, load_tokens=1)
    pool.want(fn(2, layer=1), num_bytes=10, load_tokens=5)
    pool.want(fn(3, layer=7), num_bytes=10, blocking=True)
    assert loads(pool.advance(now_s=0)) == [fn(3, 7), fn(2, 1), fn(1, 1), fn(0, 2)]


def test_a_wish_once_blocking_stays_blocking(pool):
    pool.want(fn(0), num_bytes=10, blocking=True)
    pool.want(fn(0), num_bytes=10)
    pool.unwant(fn(0))
    assert loads(pool.advance(now_s=0)) == [fn(0)]
    assert pool.loaded(fn(0), now_s=1).blocking


def test_a_load_in_flight_becomes_blocking_when_tokens_begin_to_wait(pool):
    pool.want(fn(0), num_bytes=10)
    pool.advance(now_s=0)
    pool.want(fn(0), num_bytes=10, blocking=True)
    assert pool.loaded(fn(0), now_s=1).blocking


def test_each_kind_of_wish_is_withdrawn_by_its_own_call(pool):
    pool.want(fn(0), num_bytes=10)
    pool.want(fn(1), num_bytes=10, blocking=True)
    pool.unwant(fn(0), blocking=True)
    pool.unwant(fn(1))
    assert pool.wants(fn(0))
    assert pool.wants(fn(1))
    pool.unwant(fn(0))
    pool.unwant(fn(1), blocking=True)
    pool.unwant(fn(2))
    assert pool.advance(now_s=0) == []


def test_a_models_wishes_are_withdrawn_together(pool):
    pool.want(fn(0), num_bytes=10, blocking=True)
    pool.want(fn(1), num_bytes=10)
    pool.want(FunctionId("other", 0, 0), num_bytes=10)
    pool.unwant_model("m")
    assert loads(pool.advance(now_s=0)) == [FunctionId("other", 0, 0)]


def test_room_is_made_by_the_least_worth_first_and_no_more_than_needed(pool):
    make_warm(pool, fn(0), fn(1), fn(2), fn(3))
    pool.want(fn(9), num_bytes=20)
    assert pool.advance(now_s=1) == [
        Evict(function=fn(3), reason="room"),
        Evict(function=fn(2), reason="room"),
    ]
    assert pool.advance(now_s=1) == []  # they drain; nobody else has to go
    pool.evicted(fn(3), now_s=2)
    assert pool.advance(now_s=2) == []
    pool.evicted(fn(2), now_s=2)
    assert loads(pool.advance(now_s=2)) == [fn(9)]
    assert pool.held_bytes == 40


def test_nothing_is_evicted_where_it_would_not_be_enough(pool, order):
    make_warm(pool, fn(0), fn(1), fn(2), fn(3))
    order.protected = {fn(0), fn(1), fn(2)}
    pool.want(fn(9), num_bytes=20)
    assert pool.advance(now_s=1) == []
    assert [i.state for i in pool.instances()] == [State.WARM] * 4


def test_room_for_the_most_urgent_is_not_given_to_the_next(pool):
    make_warm(pool, fn(0), fn(1), fn(2))
    pool.want(fn(8), num_bytes=20, blocking=True)
    pool.want(fn(9), num_bytes=10)
    assert [type(o) for o in pool.advance(now_s=1)] == [Evict]
    assert pool.advance(now_s=1) == []


def test_a_function_that_drains_is_loaded_again_once_it_has_left(pool):
    make_warm(pool, fn(0))
    assert pool.evict(fn(0), reason="keep-alive", now_s=1) == [
        Evict(function=fn(0), reason="keep-alive")
    ]
    pool.want(fn(0), num_bytes=10, blocking=True)
    assert pool.advance(now_s=1) == []
    pool.evicted(fn(0), now_s=2)
    assert loads(pool.advance(now_s=2)) == [fn(0)]


def test_only_a_warm_instance_is_evicted(pool):
    pool.want(fn(0), num_bytes=10)
    pool.advance(now_s=0)
    assert pool.evict(fn(0), reason="room", now_s=0) == []
    assert pool.evict(fn(1), reason="room", now_s=0) == []
    assert pool.state(fn(0)) is State.LOADING


def test_a_failed_load_gives_its_bytes_back_and_may_be_tried_again(pool):
    pool.want(fn(0), num_bytes=30)
    pool.advance(now_s=0)
    assert pool.held_bytes == 30
    pool.failed(fn(0), now_s=1)
    assert (pool.held_bytes, pool.state(fn(0))) == (0, State.COLD)
    pool.want(fn(0), num_bytes=30)
    assert loads(pool.advance(now_s=2)) == [fn(0)]


def test_a_lost_device_holds_nothing_and_wants_nothing(pool):
    make_warm(pool, fn(0), fn(1))
    pool.evict(fn(1), reason="room", now_s=0)
    pool.want(fn(2), num_bytes=10)
    pool.advance(now_s=0)
    pool.want(fn(3), num_bytes=10, blocking=True)
    gone = pool.lost(now_s=1)
    assert {i.function for i in gone} == {fn(0), fn(1), fn(2)}
    assert all(i.state is State.COLD for i in gone)
    assert pool.held_bytes == 0
    assert pool.advance(now_s=1) == []


def test_a_function_larger_than_the_budget_is_refused_with_both_sizes(pool):
    with pytest.raises(BudgetError, match=r"41 bytes, the budget is 40"):
        pool.want(fn(0), num_bytes=41)


def test_an_end_that_nobody_waits_for_is_refused(pool):
    make_warm(pool, fn(0))
    with pytest.raises(TransitionError):
        pool.loaded(fn(0), now_s=1)
    with pytest.raises(TransitionError):
        pool.failed(fn(0), now_s=1)
    with pytest.raises(TransitionError):
        pool.evicted(fn(0), now_s=1)
    assert pool.held_bytes == 10


def test_idle_instances_expire_when_their_keep_alive_ends_and_not_before(pool):
    make_warm(pool, fn(0), fn(1), at_s=10.0)
    pool.used(fn(1), finished_s=14.0)
    keep = {fn(0): 5.0, fn(1): 5.0}

    def keep_s(function, idle_s):
        return keep[function]

    assert pool.expired(keep_s, now_s=14.9) == []
    assert [i.function for i in pool.expired(keep_s, now_s=15.0)] == [fn(0)]
    assert [i.function for i in pool.expired(keep_s, now_s=19.0)] == [fn(0), fn(1)]


def test_use_of_what_is_not_warm_is_ignored(pool):
    pool.want(fn(0), num_bytes=10)
    pool.advance(now_s=0)
    pool.used(fn(0), finished_s=3.0)
    pool.used(fn(1), finished_s=3.0)
    assert pool.state(fn(0)) is State.LOADING
