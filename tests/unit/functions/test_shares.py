"""Who makes room for whom, case by case."""

import pytest

from moeless.core.clock import ManualClock
from moeless.core.memory_share import MemoryShare, parse_share
from moeless.core.model import ExpertShape, ModelSpec
from moeless.errors import BudgetError, ConfigError
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.lifecycle import State
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES = 10
EXPERTS = 4


class Host:
    """Does at once what it is told."""

    def __init__(self, parts):
        self.parts = parts
        self.evictions = []

    def load(self, function):
        self.parts.orders.append(lambda: self.parts.platform.loaded(0, function))

    def evict(self, function, *, reason):
        self.evictions.append((function.model, reason))
        self.parts.orders.append(lambda: self.parts.platform.evicted(0, function, reason=reason))


class Parts:
    """Models of four experts in each of three layers, on one device that holds twelve."""

    def __init__(self, *, slots=12, linger_s=10.0):
        self.clock = ManualClock(100.0)
        self.orders = []
        self.platform = Platform(
            [slots * BYTES],
            clock=self.clock,
            keep_alive=FixedKeepAlive(1e6),
            sink=MemorySink(),
            linger_s=linger_s,
        )
        self.host = Host(self)
        self.platform.device_up(0, self.host)
        self.boards = {}
        self.step = 0

    def attach(self, name, share=0.0, *, keep_alive=None):
        spec = ModelSpec(
            model_id=name,
            family="mixtral",
            layer_ids=(0, 1, 2),
            num_experts=EXPERTS,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        board = Board.in_process(num_layers=3, num_experts=EXPERTS, num_devices=1)
        model = self.platform.add_model(
            spec,
            function_bytes=BYTES,
            board=board,
            share=MemoryShare(fraction=share),
            keep_alive=keep_alive,
        )
        self.boards[name] = board
        self.platform.join(model, len(self.boards), board)
        return model

    def want(self, model, layers, *, busy=True):
        """Plan all experts of these layers, and carry out what follows."""
        if busy:
            self.move(model)
        for layer in layers:
            model.board.planned_LED[layer] = 1
            for expert in range(EXPERTS):
                self.platform.want(model, layer, expert, 0)
        self.platform.advance()
        self.settle()

    def move(self, model):
        self.step += 1
        self.boards[model.spec.model_id].step[0] = self.step
        model.is_busy()

    def demand(self, model, layer, experts):
        self.move(model)
        engine = list(self.boards).index(model.spec.model_id) + 1
        self.platform.demand(model, engine=engine, ticket=1, layer=layer, experts=experts)
        self.settle()
        return [result.error for result in self.platform.finished()]

    def settle(self):
        while self.orders:
            self.orders.pop(0)()

    def held(self, model):
        return self.platform.pools[0].bytes_of(model.spec.model_id) // BYTES


@pytest.fixture
def parts():
    return Parts()


def test_memory_that_nobody_needs_is_anybodys(parts):
    first, second = parts.attach("first", 0.5), parts.attach("second")
    parts.want(second, [0, 1, 2])
    assert parts.held(second) == 12
    assert first.capacity_D(0).tolist() == [4]


def test_an_idle_model_yields_all_that_is_beyond_its_share(parts):
    first, second = parts.attach("first", 0.25), parts.attach("second")
    parts.want(first, [0, 1, 2])
    parts.clock.advance(5.0)
    parts.want(second, [0, 1, 2])
    assert (parts.held(first), parts.held(second)) == (3, 9)


def test_busy_models_end_equally_far_above_their_shares(parts):
    first, second = parts.attach("first", 0.5), parts.attach("second")
    parts.want(first, [0, 1, 2])
    parts.want(second, [0, 1, 2])
    assert (parts.held(first), parts.held(second)) == (9, 3)
    parts.want(first, [0, 1, 2])
    assert (parts.held(first), parts.held(second)) == (9, 3), "and nobody takes it back"


def test_a_model_without_traffic_for_a_minute_keeps_nothing(parts):
    first, second = parts.attach("first", 0.5), parts.attach("second")
    parts.want(first, [0, 1, 2])
    parts.clock.advance(59.0)
    parts.want(second, [0, 1, 2])
    assert parts.held(first) == 6
    parts.clock.advance(2.0)
    parts.want(second, [0, 1, 2])
    assert parts.held(first) == 0
    parts.want(first, [0, 1])
    assert parts.held(first) >= 6, "with its first request it is due its share again"


def test_a_model_that_only_attaches_takes_nothing_from_a_busy_one_beyond_its_share(parts):
    first, second = parts.attach("first"), parts.attach("second", 0.25)
    parts.want(first, [0, 1, 2])
    parts.want(second, [0, 1, 2], busy=False)
    assert (parts.held(first), parts.held(second)) == (9, 3)


def test_tokens_that_wait_are_served_from_those_above_their_share_only(parts):
    first, second = parts.attach("first", 0.5), parts.attach("second")
    parts.want(first, [0, 1, 2])
    for layer in (0, 1, 2):
        assert parts.demand(second, layer, range(EXPERTS)) == [None]
    assert parts.held(first) >= 6


def test_plans_follow_what_others_use(parts):
    first, second = parts.attach("first", 0.25), parts.attach("second")
    slots = lambda model: parts.platform.slots_D(model).tolist()  # noqa: E731 - short for lists
    parts.platform.tick()
    assert (slots(first), slots(second)) == ([12], [12])
    parts.want(first, [0, 1, 2])
    parts.want(second, [0, 1, 2])
    parts.platform.tick()
    # Three are guaranteed, nine are for both: four and a half for each.
    assert (slots(first), slots(second)) == ([7], [4])
    parts.clock.advance(5.0)
    parts.move(second)
    parts.platform.tick()
    assert slots(second) == [9], "an idle one keeps its share"
    parts.clock.advance(100.0)
    parts.platform.tick()
    assert slots(second) == [12], "and asleep nothing"


def test_a_model_whose_engines_have_left_gives_back_its_memory_after_a_while(parts):
    first = parts.attach("first", 1.0)
    parts.want(first, [0, 1, 2])
    parts.platform.leave(first, 1)
    parts.clock.advance(9.0)
    parts.platform.tick()
    assert parts.held(first) == 12
    parts.clock.advance(1.0)
    parts.platform.tick()
    parts.settle()
    assert parts.held(first) == 0
    parts.attach("second", 1.0)  # what was guaranteed is free again


def test_each_model_has_its_own_keep_alive(parts):
    first = parts.attach("first", keep_alive=FixedKeepAlive(20.0))
    second = parts.attach("second", keep_alive=FixedKeepAlive(40.0))
    parts.want(first, [0])
    parts.want(second, [0])
    held = []
    for _ in range(3):
        parts.clock.advance(15.0)
        parts.platform.tick()
        parts.settle()
        held.append((parts.held(first), parts.held(second)))
    assert held == [(4, 4), (0, 4), (0, 0)]


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([0.5, 0.6], "m1 asks for 60% of each device, but .* only 60 are not guaranteed"),
        ([0.7, 0.0], "hold 3 experts .* beside what others are guaranteed .*m0: 70%"),
        ([0.0, 0.7], "leaves room for 3 experts of m0, whose layers have 4"),
    ],
)
def test_guarantees_that_do_not_go_together_are_refused_with_the_figures(parts, shares, reason):
    parts.attach("m0", shares[0])
    with pytest.raises(BudgetError, match=reason):
        parts.attach("m1", shares[1])
    assert list(parts.platform.models) == ["m0"]


def test_reserved_memory_is_divided_by_guarantees_and_what_is_left_equally(parts):
    first, second = parts.attach("first", 0.5), parts.attach("second")
    parts.clock.advance(10.0)
    reserved = [sum(m.report()["gb_s_L"]["reserved"]) * 1e9 for m in (first, second)]
    assert reserved == pytest.approx([90 * 10.0, 30 * 10.0])


def test_what_is_loading_or_leaving_is_no_victim(parts):
    first, second = parts.attach("first"), parts.attach("second")
    parts.want(first, [0, 1, 2])
    parts.move(second)
    for expert in range(EXPERTS):
        parts.platform.want(second, 0, expert, 0)
    parts.platform.advance()
    states = [i.state for i in parts.platform.pools[0].instances()]
    assert states.count(State.DRAINING) == 1
    parts.settle()
    assert parts.held(second) == 4


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("25%", MemoryShare(fraction=0.25)),
        (" 0.25 ", MemoryShare(fraction=0.25)),
        ("1", MemoryShare(fraction=1.0)),
        ("0", MemoryShare()),
        ("512MB", MemoryShare(num_bytes=512_000_000)),
    ],
)
def test_shares_are_read_as_parts_or_bytes(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "nan", "-5%", "101%", "25", "all", "%", "1e99GB"])
def test_what_is_no_share_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"share|--memory-share"):
        parse_share(text)
