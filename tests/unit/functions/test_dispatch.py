"""The token path with devices that forget, fail and lose their experts."""

import numpy as np
import pytest
import torch

from moeless.core.model import ExpertShape, ModelSpec
from moeless.errors import FunctionError, UnavailableError
from moeless.functions.links.board import Board
from moeless.functions.links.segment_status import FAILED, NOT_WARM, OK
from moeless.functions.token_path.announcer import ExpectedLoad, LookAhead
from moeless.functions.token_path.dispatch import Answer, ExpertDispatcher
from moeless.policies.splitters.even import EvenSplitter
from moeless.policies.splitters.slots import SlotSplitter

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 6, 2, 4


def make_spec(**shape):
    return ModelSpec(
        model_id="m",
        family="mixtral",
        layer_ids=(0, 1),
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert=ExpertShape(hidden=HIDDEN, intermediate=3, dtype="float32", **shape),
    )


class Client:
    """A platform that makes what is demanded warm somewhere, and remembers."""

    wants_loads = True
    function_bytes = 100

    def __init__(self, num_devices, *, seed=0):
        self.num_devices = num_devices
        self.board = Board.in_process(
            num_layers=LAYERS, num_experts=EXPERTS, num_devices=num_devices
        )
        self.random = np.random.default_rng(seed)
        self.demanded = []
        self.awaited = []
        self.announced = 0
        self.refusal = None

    def announce_loads(self):
        self.announced += 1

    def demand(self, *, layer, experts):
        assert experts
        assert not self.board.warm_LED[layer, experts].any(), "only what is cold is demanded"
        self.demanded.append((layer, experts))
        return len(self.demanded)

    def await_demand(self, ticket, *, timeout_s):
        self.awaited.append(ticket)
        if self.refusal is not None:
            raise UnavailableError(self.refusal)
        layer, experts = self.demanded[ticket - 1]
        for expert in experts:
            self.board.warm_LED[layer, expert, self.random.integers(self.num_devices)] = 1


class Invoker:
    """Computes experts as plain matrices; ``misbehave`` chooses the status of each segment."""

    def __init__(self, client, *, max_rows=64, misbehave=None):
        self.client = client
        self.max_rows = max_rows
        self.weights_LEHH = torch.randn(
            LAYERS, EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7)
        )
        self.misbehave = misbehave or (lambda layer, expert, device: OK)
        self.done = None
        self.invocations = []

    def begin(self, layer, *, x_TH, token_S, segments, y_SH=None):
        assert len(segments) == self.client.num_devices
        assert len(x_TH) <= self.max_rows
        if y_SH is None:
            y_SH = torch.full((len(token_S), HIDDEN), float("nan"))
            self.done = np.zeros(len(token_S), dtype=int)
        self.work = layer, x_TH, token_S, segments, y_SH

    def finish(self):
        layer, x_TH, token_S, segments, y_SH = self.work
        status = []
        for device, segments_n3 in enumerate(segments):
            assert segments_n3.shape[1] == 3
            assert len(set(segments_n3[:, 0].tolist())) == len(segments_n3)
            status_n = np.zeros(len(segments_n3), dtype=np.uint8)
            for i, (expert, start, stop) in enumerate(segments_n3.tolist()):
                assert start < stop
                self.invocations.append((layer, expert, device, stop - start))
                status_n[i] = self.misbehave(layer, expert, device)
                if status_n[i] == OK:
                    x_nH = x_TH[token_S[start:stop]]
                    y_SH[start:stop] = x_nH @ self.weights_LEHH[layer, expert]
                    self.done[start:stop] += 1
                elif status_n[i] == NOT_WARM:
                    self.client.board.warm_LED[layer, expert, device] = 0
            status.append(status_n)
        return Answer(y_SH=y_SH, status=status, busy_ns=[10 * len(s) for s in segments])

    def close(self):
        pass


def draw_tokens(rows, *, seed=0, experts=range(EXPERTS)):
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(rows, HIDDEN, generator=generator)
    choose = np.random.default_rng(seed)
    ids = [choose.choice(list(experts), size=TOP_K, replace=False) for _ in range(rows)]
    ids_TK = torch.tensor(np.array(ids).reshape(rows, TOP_K), dtype=torch.int64)
    weights_TK = torch.rand(rows, TOP_K, generator=generator)
    return x_TH, ids_TK, weights_TK


def dense(invoker, layer, x_TH, ids_TK, weights_TK):
    y_TH = torch.zeros_like(x_TH)
    for token in range(len(x_TH)):
        for k in range(TOP_K):
            y_H = x_TH[token] @ invoker.weights_LEHH[layer, ids_TK[token, k]]
            y_TH[token] += weights_TK[token, k] * y_H
    return y_TH


def make(num_devices=2, *, warm=True, spec=None, splitter=None, **keywords):
    client = Client(num_devices)
    invoker = Invoker(client, **keywords)
    if warm:
        client.board.warm_LED[:] = 1
        client.board.planned_LED[:] = 1
    dispatcher = ExpertDispatcher(
        spec or make_spec(),
        client=client,
        invoker=invoker,
        splitter=splitter or EvenSplitter(),
    )
    return dispatcher, client, invoker


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 40, 64])
def test_the_output_is_that_of_a_dense_layer(num_devices, rows):
    dispatcher, client, invoker = make(num_devices)
    for layer in range(LAYERS):
        tokens = draw_tokens(rows, seed=layer)
        y_TH = dispatcher(layer, *tokens)
        torch.testing.assert_close(y_TH, dense(invoker, layer, *tokens))
        assert (invoker.done == 1).all()
    assert client.demanded == []


def test_no_tokens_give_no_output_and_no_work():
    dispatcher, client, invoker = make()
    y_TH = dispatcher(0, *draw_tokens(0))
    assert y_TH.shape == (0, HIDDEN)
    assert invoker.invocations == []
    assert client.announced == 0


def test_experts_without_tokens_are_neither_invoked_nor_demanded():
    dispatcher, client, invoker = make(warm=False)
    tokens = draw_tokens(9, experts=[1, 4, 5])
    torch.testing.assert_close(dispatcher(1, *tokens), dense(invoker, 1, *tokens))
    assert client.demanded == [(1, [1, 4, 5])]
    assert {expert for _, expert, _, _ in invoker.invocations} == {1, 4, 5}


@pytest.mark.parametrize("rows", [4, 5, 8, 33])
def test_longer_inputs_are_computed_in_pieces_and_announced_once(rows):
    dispatcher, client, invoker = make(max_rows=4)
    tokens = draw_tokens(rows)
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))
    assert client.announced == 1
    assert (
        client.board.actual_LE[0].tolist()
        == torch.bincount(tokens[1].flatten(), minlength=EXPERTS).tolist()
    )


@pytest.mark.parametrize("max_rows", [2, 5, 64])
@pytest.mark.parametrize("rows", [1, 6, 31])
def test_scores_on_the_input_weigh_it_before_the_expert(rows, max_rows):
    dispatcher, _, invoker = make(spec=make_spec(score_on="input"), max_rows=max_rows)
    tokens = draw_tokens(rows)
    # The experts of this test are linear, so weighing before and after is the same.
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))


def test_weights_in_another_dtype_than_the_rows_are_accepted():
    dispatcher, _, invoker = make()
    x_TH, ids_TK, weights_TK = draw_tokens(5)
    y_TH = dispatcher(0, x_TH, ids_TK, weights_TK.double())
    assert y_TH.dtype == torch.float32
    torch.testing.assert_close(y_TH, dense(invoker, 0, x_TH, ids_TK, weights_TK))


def test_a_planned_replica_is_preferred_and_an_unplanned_one_is_better_than_waiting():
    dispatcher, client, invoker = make(warm=False)
    client.board.warm_LED[0] = 1
    client.board.planned_LED[0, :3, 1] = 1
    dispatcher(0, *draw_tokens(30))
    assert client.demanded == []
    for _, expert, device, _ in invoker.invocations:
        assert expert >= 3 or device == 1


@pytest.mark.parametrize(
    ("splitter", "shares"), [(SlotSplitter(), (40, 20)), (EvenSplitter(), (30, 30))]
)
def test_a_device_with_two_copies_takes_two_shares_if_the_splitter_divides_by_copies(
    splitter, shares
):
    dispatcher, client, invoker = make(splitter=splitter)
    client.board.planned_LED[0, :, 0] = 2
    x_TH, _, weights_TK = draw_tokens(60)
    tokens = (x_TH, torch.tensor([[0, 1]] * 60), weights_TK)
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))
    for expert in (0, 1):
        given = {d: rows for _, e, d, rows in invoker.invocations if e == expert}
        assert (given[0], given[1]) == shares
    assert dispatcher.stats.planned_replicas == dispatcher.stats.warm_replicas == 2 * EXPERTS


def test_a_cold_device_gets_no_share_for_its_copies_and_an_unplanned_replica_gets_one():
    dispatcher, client, invoker = make(3, warm=False, splitter=SlotSplitter())
    client.board.planned_LED[0, :, 0] = 2
    client.board.warm_LED[0, :, 1:] = 1
    tokens = draw_tokens(60)
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))
    assert client.demanded == []
    rows = [sum(n for _, _, d, n in invoker.invocations if d == device) for device in range(3)]
    assert rows == [0, 60, 60]


def test_warm_experts_are_computed_before_a_cold_one_is_waited_for():
    dispatcher, client, invoker = make(warm=False)
    client.board.warm_LED[0, :5, 0] = client.board.planned_LED[0, :5, 0] = 1
    before_wait = []
    wait = client.await_demand

    def await_demand(ticket, *, timeout_s):
        before_wait.extend(invoker.invocations)
        wait(ticket, timeout_s=timeout_s)

    client.await_demand = await_demand
    tokens = draw_tokens(30)
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))
    assert client.demanded == [(0, [5])]
    assert {expert for _, expert, _, _ in before_wait} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("splitter", [EvenSplitter(), SlotSplitter()], ids=["even", "slots"])
def test_replicas_that_vanish_or_fail_at_random_change_nothing(seed, splitter):
    random = np.random.default_rng(seed)
    failed = set()

    def misbehave(layer, expert, device):
        if (expert, device) in failed:
            raise AssertionError("a replica that failed was asked again")
        if random.random() < 0.2:
            return NOT_WARM
        others = {d for e, d in failed if e == expert}
        if len(others) < 2 and random.random() < 0.15:
            failed.add((expert, device))
            return FAILED
        return OK

    dispatcher, client, invoker = make(4, misbehave=misbehave, splitter=splitter)
    client.board.warm_LED[:] = random.random(client.board.warm_LED.shape) < 0.7
    client.board.planned_LED[:] = random.choice(4, size=client.board.warm_LED.shape)
    for layer in range(LAYERS):
        failed.clear()
        tokens = draw_tokens(50, seed=seed)
        try:
            y_TH = dispatcher(layer, *tokens)
        except FunctionError as error:
            expert = int(str(error).split("expert ")[1].split(":")[0])
            assert any(e == expert for e, _ in failed)
            continue
        torch.testing.assert_close(y_TH, dense(invoker, layer, *tokens))
        assert (invoker.done == 1).all()
    assert client.awaited == list(range(1, len(client.demanded) + 1))


def test_an_expert_that_fails_on_its_only_device_is_named():
    dispatcher, _, _ = make(1, misbehave=lambda _l, e, _d: FAILED if e == 3 else OK)
    with pytest.raises(FunctionError, match="layer 1, expert 3"):
        dispatcher(1, *draw_tokens(20))


def test_an_expert_that_never_stays_warm_is_given_up():
    dispatcher, client, _ = make(1, misbehave=lambda _l, e, _d: NOT_WARM if e == 3 else OK)
    with pytest.raises(UnavailableError, match="layer 0: experts do not stay warm"):
        dispatcher(0, *draw_tokens(20))
    assert all(experts == [3] for _, experts in client.demanded)


def test_an_error_leaves_the_dispatcher_usable():
    dispatcher, client, invoker = make(warm=False)
    client.refusal = "layer 0, expert 0: shard gone"
    with pytest.raises(UnavailableError, match="shard gone"):
        dispatcher(0, *draw_tokens(8))
    client.refusal = None
    tokens = draw_tokens(8, seed=1)
    torch.testing.assert_close(dispatcher(0, *tokens), dense(invoker, 0, *tokens))


def test_steps_count_iterations_whatever_layers_they_skip():
    dispatcher, client, _ = make()
    for layer, step in [(0, 1), (1, 1), (0, 2), (0, 3), (1, 3), (1, 4)]:
        dispatcher(layer, *draw_tokens(3))
        assert client.board.step[0] == step
        assert client.board.actual_step_L[layer] == step


def test_the_board_shows_the_layer_that_runs_and_none_once_the_step_has_ended_or_failed():
    dispatcher, client, invoker = make()
    seen = []
    begin = invoker.begin
    invoker.begin = lambda layer, **work: (
        seen.append(int(client.board.layer[0])),
        begin(layer, **work),
    )
    for layer, afterwards in [(0, 0), (1, -1), (0, 0), (1, -1)]:
        dispatcher(layer, *draw_tokens(3))
        assert client.board.layer[0] == afterwards
    assert seen == [0, 1, 0, 1]
    dispatcher(0, *draw_tokens(3))
    nothing = [rows[:0] for rows in draw_tokens(3)]
    dispatcher(1, *nothing)
    assert client.board.layer[0] == -1, "nor where its last layer has no tokens"
    client.board.warm_LED[:], client.refusal = 0, "shard gone"
    with pytest.raises(UnavailableError):
        dispatcher(0, *draw_tokens(3))
    assert client.board.layer[0] == -1


def test_a_forecast_is_written_for_the_layer_it_is_for_and_judged_when_that_has_run():
    client = Client(1)
    client.board.warm_LED[:] = client.board.planned_LED[:] = 1
    tokens = draw_tokens(10)
    count_E = np.bincount(tokens[1].numpy().ravel(), minlength=EXPERTS)
    dispatcher = ExpertDispatcher(
        make_spec(),
        client=client,
        invoker=Invoker(client),
        splitter=EvenSplitter(),
        look_ahead=LookAhead(
            distance=1, forecast=lambda layer, x_TH: ExpectedLoad(count_E * 3, 0.25)
        ),
    )
    dispatcher(0, *tokens)
    assert client.board.forecast_LE[1].tolist() == (count_E * 3).tolist()
    assert client.board.forecast_error_L.tolist() == [0, 0.25]
    assert client.board.forecast_step_L.tolist() == [0, 1]
    dispatcher(1, *tokens)
    accuracy_L = dispatcher.stats.accuracy_L
    assert np.isnan(accuracy_L[0])
    assert accuracy_L[1] == pytest.approx(1.0)


def test_without_a_forecast_what_the_plan_was_made_for_is_judged_if_it_was_for_this_step():
    dispatcher, client, _ = make()
    tokens = draw_tokens(10)
    count_E = np.bincount(tokens[1].numpy().ravel(), minlength=EXPERTS)
    client.board.plan_load_LE[:] = np.roll(count_E, 1)
    client.board.plan_step_L[:] = 2
    dispatcher(0, *tokens)  # the plan is for another step
    assert np.isnan(dispatcher.stats.accuracy_L).all()
    dispatcher(0, *tokens)
    expected = 1 - abs(np.roll(count_E, 1) - count_E).sum() / 2 / count_E.sum()
    assert dispatcher.stats.accuracy_L[0] == pytest.approx(expected)
    assert np.isnan(dispatcher.stats.accuracy_L[1])


def test_accuracy_is_that_of_the_newest_steps():
    stats = make()[0].stats
    right, wrong = np.array([4.0, 0, 0, 0, 0, 0]), np.array([0, 4.0, 0, 0, 0, 0])
    for _ in range(300):
        stats.record_accuracy(0, wrong, right)
    assert stats.accuracy_L[0] == 0.0
    stats.record_accuracy(0, right, right)
    assert stats.accuracy_L[0] == pytest.approx(1 / 256)
    for _ in range(1500):
        stats.record_accuracy(0, right, right)
    assert stats.accuracy_L[0] > 0.99


def test_fixed_plans_need_no_loads():
    dispatcher, client, _ = make()
    client.wants_loads = False
    dispatcher(0, *draw_tokens(3))
    assert client.announced == 0
    assert not client.board.actual_LE.any()


class Measuring(EvenSplitter):
    """Has something new to say of devices' speeds after every second layer."""

    def __init__(self):
        super().__init__()
        self.notes = 0

    def note_work(self, tokens_ED, busy_ns_D):
        self.notes += 1
        return self.notes % 2 == 0

    def measured_D(self):
        return np.array([1.0, 1.0 / self.notes])


def test_what_a_splitter_measures_of_devices_is_on_the_engines_board():
    dispatcher, client, _ = make(splitter=Measuring())
    dispatcher(0, *draw_tokens(4))
    assert client.board.read_speeds() is None
    dispatcher(1, *draw_tokens(4))
    assert client.board.read_speeds().tolist() == [1.0, 0.5]
    dispatcher(0, *draw_tokens(4))
    assert client.board.read_speeds().tolist() == [1.0, 0.5]


def test_a_splitter_that_measures_nothing_leaves_nothing_on_the_board():
    dispatcher, client, _ = make()
    dispatcher(0, *draw_tokens(4))
    assert client.board.read_speeds() is None
