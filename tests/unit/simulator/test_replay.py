"""One policy on one trace: what the token path finds, waits for and takes."""

import numpy as np
import pytest

from fakes.replays import COST, EXPERT, draw_trace, make_trace, run
from moeless.core.layer_cost import LayerCost
from moeless.core.plan import Plan
from moeless.core.policy_set import PolicySet
from moeless.costs.linear import LinearTime
from moeless.errors import BudgetError, PlanError
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import ExactForecast
from moeless.simulator.replay import ReplayConfig, replay_policy


class Scripted:
    """Plans what a function of (step, layer) says, as rows of devices per expert."""

    def __init__(self, rows_of, *, release=False):
        self.rows_of = rows_of
        self.release = release
        self.requests = []

    def plan(self, request):
        self.requests.append(request)
        rows = self.rows_of(request.step, request.layer)
        replicas_ED = np.zeros((request.num_experts, request.num_devices), dtype=np.uint8)
        for expert, devices in enumerate(rows):
            replicas_ED[expert, list(devices)] = 1
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=replicas_ED,
            load_E=request.load_E,
            release=self.release,
        )


def replay_scripted(trace, planner, *, cost=COST, keep_s=float("inf"), **config):
    clock = SimulatedClock()
    policies = PolicySet(
        name="scripted",
        planner=planner,
        splitter=EvenSplitter(),
        history=PreviousPredictor(),
    )
    defaults = {
        "num_devices": 2,
        "device_bytes": 100 * EXPERT.num_bytes,
        "expert": EXPERT,
        "load_s": 0.01,
        "lookahead": 1,
        "decision_s": 0.0,
        "keep_replicas": True,
    }
    return replay_policy(
        trace,
        policies,
        clock=clock,
        time_model=LinearTime(cost=cost, label="test"),
        forecast=ExactForecast(trace.loads_NLE),
        keep_alive=FixedKeepAlive(keep_s),
        config=ReplayConfig(**(defaults | config)),
    )


STAY = [[0], [1]]
"""Expert 0 on device 0, expert 1 on device 1."""


def test_with_a_fixed_plan_every_device_gets_its_experts_tokens():
    trace = make_trace([[[3, 1]], [[0, 4]]])
    recording = replay_scripted(trace, Scripted(lambda step, layer: STAY))
    assert recording.device_tokens_SLD[:, 0].tolist() == [[3, 1], [0, 4]]
    assert recording.warm_SL.tolist() == [[2], [2]]
    assert recording.replicas_SLED[:, 0].tolist() == [[[1, 0], [0, 1]]] * 2
    assert recording.layer_s_SL[:, 0].tolist() == pytest.approx([3 * 1.2e-3, 4 * 1.2e-3])
    assert recording.busy_s_SL[:, 0].tolist() == pytest.approx([4e-3, 4e-3])
    assert not recording.cold_SL.any()


def test_what_is_planned_at_first_is_loaded_before_the_trace_begins():
    trace = make_trace([[[1, 1]]], time_s=[50.0])
    recording = replay_scripted(trace, Scripted(lambda step, layer: [[0, 1], [0, 1]]), load_s=9.0)
    assert recording.warm_SL.tolist() == [[4]]
    assert recording.start_s_S.tolist() == [0.0]
    # Four experts of 600 bytes, held while a step of 1.2 ms runs.
    held_gb = 4 * EXPERT.num_bytes / 1e9
    assert recording.resident_gb_s_S[1] - recording.resident_gb_s_S[0] == pytest.approx(
        held_gb * 1.2e-3
    )


def test_steps_start_at_their_arrival_or_when_the_step_before_ends():
    trace = make_trace([[[2, 0], [0, 2]]] * 3, time_s=[0.0, 0.001, 5.0])
    recording = replay_scripted(
        trace, Scripted(lambda step, layer: STAY), cost=LayerCost(token_s=1.0), misc_s=0.25
    )
    assert recording.start_s_S.tolist() == pytest.approx([0.0, 4.5, 9.0])
    assert recording.end_s == pytest.approx(13.5)
    assert recording.layer_s_SL.ravel().tolist() == pytest.approx([2.0] * 6)


def move_to_both(at_step, at_layer):
    """Expert 0 of a layer gets a second replica from a step on (the engine's steps are from 1)."""

    def rows(step, layer):
        return [[0, 1], [1]] if layer == at_layer and step >= at_step else STAY

    return rows


def test_a_replica_counts_only_if_its_load_ended_before_the_gate_spoke():
    trace = make_trace([[[4, 4], [8, 0]]] * 3, time_s=[0.0, 10.0, 20.0])
    # Layer 0 takes 4 x 1.2 ms: a load of 4 ms that begins with its gate is in time for layer 1.
    quick = replay_scripted(trace, Scripted(move_to_both(2, 1)), load_s=0.004)
    assert quick.device_tokens_SLD[:, 1].tolist() == [[8, 0], [4, 4], [4, 4]]
    slow = replay_scripted(trace, Scripted(move_to_both(2, 1)), load_s=0.005)
    assert slow.device_tokens_SLD[:, 1].tolist() == [[8, 0], [8, 0], [4, 4]]
    assert slow.cold_SL.tolist() == quick.cold_SL.tolist() == [[0, 0], [0, 1], [0, 0]]
    assert not slow.blocking_SL.any()


def test_a_decision_takes_its_time():
    trace = make_trace([[[4, 4], [8, 0]]] * 3, time_s=[0.0, 10.0, 20.0])
    script = Scripted(move_to_both(2, 1))
    late = replay_scripted(trace, script, load_s=0.004, decision_s=0.001)
    assert late.device_tokens_SLD[:, 1].tolist() == [[8, 0], [8, 0], [4, 4]]


def test_tokens_wait_only_for_experts_that_are_warm_nowhere():
    def rows(step, layer):
        return [[0], []] if step == 0 else STAY

    trace = make_trace([[[4, 0]], [[4, 2]], [[4, 2]]], time_s=[0.0, 10.0, 20.0])
    recording = replay_scripted(
        trace, Scripted(rows), cost=LayerCost(token_s=1e-3), load_s=0.1, decision_s=1.0
    )
    assert recording.device_tokens_SLD.sum(axis=2).ravel().tolist() == [4, 6, 6]
    assert recording.blocking_SL.ravel().tolist() == [0, 1, 0]
    assert recording.cold_SL.ravel().tolist() == [0, 1, 0]
    # The others run while it loads; then its own two tokens take their time.
    assert recording.layer_s_SL[1, 0] == pytest.approx(0.1 + 2e-3)
    # What was loaded for waiting tokens was not warm when the gate spoke.
    assert recording.warm_SL.ravel().tolist() == [1, 1, 2]


def test_an_unplanned_warm_replica_serves_where_no_planned_one_is_warm():
    def rows(step, layer):
        return STAY if step < 2 else [[1], [0]]

    trace = make_trace([[[2, 1]]] * 3, time_s=[0.0, 10.0, 20.0])
    recording = replay_scripted(
        trace, Scripted(rows), load_s=1.0, decision_s=0.0, cost=LayerCost(token_s=1e-3)
    )
    # The swap planned after step 0 is warm by step 1; the old places stay until their end.
    assert recording.device_tokens_SLD[:, 0].tolist() == [[2, 1], [1, 2], [1, 2]]
    close = make_trace([[[2, 1]]] * 3, time_s=[0.0, 0.5, 20.0])
    recording = replay_scripted(
        close, Scripted(rows), load_s=1.0, decision_s=0.0, cost=LayerCost(token_s=1e-3)
    )
    assert recording.device_tokens_SLD[:, 0].tolist() == [[2, 1], [2, 1], [1, 2]]
    assert not recording.blocking_SL.any()


@pytest.mark.parametrize("release", [False, True])
def test_retired_replicas_stay_until_keep_alive_ends_unless_the_plan_releases_them(release):
    def rows(step, layer):
        return [[0, 1], [1]] if step < 2 else STAY

    trace = make_trace([[[2, 1]]] * 5, time_s=[0.0, 10.0, 20.0, 30.0, 40.0])
    recording = replay_scripted(trace, Scripted(rows, release=release), keep_s=15.0, tick_s=1.0)
    # Planned away after step 0, and not used since.
    expected = [3, 2, 2, 2, 2] if release else [3, 3, 2, 2, 2]
    assert recording.warm_SL.ravel().tolist() == expected


def test_a_ceiling_retires_the_longest_unused_replicas_first():
    def rows(step, layer):
        return [[step % 4], [3]]

    trace = make_trace([[[2, 2]]] * 9)
    recording = replay_scripted(trace, Scripted(rows), num_devices=4, max_replicas=3, load_s=0.001)
    assert recording.warm_SL.max() == 3
    assert recording.device_tokens_SLD.sum(axis=2).ravel().tolist() == [4] * 9


def test_a_layer_without_tokens_takes_no_time_and_asks_for_no_plan():
    trace = make_trace([[[2, 2], [2, 2]], [[0, 0], [0, 0]], [[2, 2], [2, 2]]])
    planner = Scripted(lambda step, layer: STAY)
    recording = replay_scripted(trace, planner)
    assert recording.layer_s_SL[1].tolist() == [0.0, 0.0]
    assert recording.warm_SL[1].tolist() == [2, 2]
    assert sorted({(r.step, r.layer) for r in planner.requests if r.step}) == [
        (1, 1),
        (2, 0),
        (3, 1),
        (4, 0),
    ]


def test_the_first_layers_are_planned_from_history_and_the_others_from_forecasts():
    trace = make_trace([[[4, 1], [1, 4], [5, 0]]] * 2)
    planner = Scripted(lambda step, layer: STAY)
    replay_scripted(trace, planner, lookahead=2)
    asked = [(r.step, r.layer, r.load_E.tolist()) for r in planner.requests if r.step]
    assert asked == [
        (1, 2, [5, 0]),
        (2, 0, [4, 1]),
        (2, 1, [1, 4]),
        (2, 2, [5, 0]),
        (3, 0, [4, 1]),
        (3, 1, [1, 4]),
    ]


def test_a_policy_that_cannot_plan_at_all_says_why():
    class Broken:
        def plan(self, request):
            raise PlanError("no idea")

    with pytest.raises(PlanError, match="no idea"):
        replay_scripted(make_trace([[[1, 1]]]), Broken())


def test_a_plan_that_fails_later_is_counted_and_the_one_in_force_stays():
    class Moody(Scripted):
        def plan(self, request):
            if request.step >= 2:
                raise PlanError("not today")
            return super().plan(request)

    trace = make_trace([[[1, 1]]] * 4)
    recording = replay_scripted(trace, Moody(lambda step, layer: STAY))
    assert recording.failed_plans == 4
    assert recording.device_tokens_SLD[:, 0].tolist() == [[1, 1]] * 4


def test_devices_too_small_for_a_layer_are_refused():
    with pytest.raises(BudgetError, match="layer of tiny"):
        replay_scripted(
            make_trace([[[1, 1]]]),
            Scripted(lambda step, layer: STAY),
            device_bytes=EXPERT.num_bytes - 1,
        )


class Searching(Scripted):
    """Notes when it was told, asked and let search."""

    def __init__(self):
        super().__init__(lambda step, layer: STAY)
        self.seen = []

    def observe(self, *, step, layer, load_E):
        self.seen.append(("observe", step, layer))

    def search_due(self, layer):
        return self.seen[-1] == ("observe", 2, 0)

    def begin_search(self, layer):
        self.seen.append(("search", layer))
        return lambda: lambda: None

    def stands(self, layer):
        return False


def test_a_search_runs_beside_the_token_path():
    trace = make_trace([[[4, 4], [4, 4]]] * 3, time_s=[0.0, 10.0, 20.0])
    planner = Searching()
    # A layer takes 4.8 ms: the search is done within the next one.
    recording = replay_scripted(trace, planner, search_s=0.006)
    assert planner.seen == [
        ("observe", 1, 0),
        ("observe", 1, 1),
        ("observe", 2, 0),
        ("observe", 2, 1),
        ("search", 0),
        ("observe", 3, 0),
        ("observe", 3, 1),
    ]
    assert len(recording.search_s) == 1
    assert recording.layer_s_SL.ravel().tolist() == pytest.approx([4.8e-3] * 6)


@pytest.mark.parametrize("name", ["static", "paper", "eplb", "swift", "moeless"])
def test_every_policy_computes_every_token_and_repeats_itself(name):
    trace = draw_trace(steps=60)
    first, again = run(trace, name, forecast="0.2"), run(trace, name, forecast="0.2")
    loads_SL = trace.loads_NLE.sum(axis=2)
    assert (first.device_tokens_SLD.sum(axis=2) == loads_SL).all()
    for field in ("device_tokens_SLD", "layer_s_SL", "warm_SL", "cold_SL", "resident_gb_s_S"):
        assert (getattr(first, field) == getattr(again, field)).all(), field
    assert (first.replicas_SLED.sum(axis=(2, 3)) == first.warm_SL).all()


@pytest.mark.parametrize("name", ["paper", "eplb", "swift", "moeless"])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_no_policy_holds_more_on_the_mean_than_its_memory_factor(name, factor):
    trace = draw_trace(steps=80)
    recording = run(trace, name, memory_factor=factor, forecast="0.2", load_s=1e-3)
    assert recording.warm_SL.mean() / 8 <= factor + 0.02


@pytest.mark.parametrize("history", ["previous", "ewma"])
def test_loads_may_be_expected_from_history_alone(history):
    trace = draw_trace(steps=40)
    recording = run(trace, "paper", forecast=history)
    assert (recording.device_tokens_SLD.sum(axis=2) == trace.loads_NLE.sum(axis=2)).all()
    assert recording.warm_SL.max() > 8


def test_kinds_of_timings_are_those_after_the_warm_up_where_there_are_any():
    trace = draw_trace(steps=20)
    moving, fixed = run(trace, "paper"), run(trace, "static")
    layers = trace.meta.num_layers
    assert len(moving.split_s) == 18 * layers
    assert len(moving.plan_s) == 18 * layers
    assert len(fixed.plan_s) == layers


def test_an_explanation_has_loads_replicas_shares_and_what_changed():
    def rows(step, layer):
        return [[0, 1], [1]] if (layer == 1 and step == 2) else STAY

    class Talking(Scripted):
        def explain(self, layer):
            return f"layer {layer} felt hot"

    trace = make_trace([[[4, 4], [8, 0]]] * 4, time_s=[0.0, 10.0, 20.0, 30.0])
    planner = Talking(rows, release=True)
    told = replay_scripted(trace, planner, load_s=0.004, explain=(1, 1)).explanation
    assert told["planned"] == told["warm"] == [[0, 1], [1]]
    assert told["expected_load"] == told["true_load"] == [8, 0]
    assert told["planned_for_step"] == 1
    assert told["shares"] == [[4, 4], [0, 0]]
    assert (told["device_tokens"], told["ideal_device_tokens"]) == ([4, 4], 4)
    assert told["loaded"] == [
        {
            "expert": 0,
            "device": 1,
            "bytes": EXPERT.num_bytes,
            "load_s": pytest.approx(0.004),
            "blocking": False,
        }
    ]
    assert told["evicted"] == []
    assert told["load_price"] == {"bytes": EXPERT.num_bytes, "link_s": 0.004}
    assert told["layer_s"] == pytest.approx(4 * 1.2e-3)
    assert told["reason"] == "layer 1 felt hot"
    later = replay_scripted(trace, Scripted(rows, release=True), load_s=0.004, explain=(2, 1))
    assert later.explanation["evicted"] == [{"expert": 0, "device": 1, "reason": "released"}]
    assert later.explanation["reason"] is None
