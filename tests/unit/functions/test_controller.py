"""The control loop with a placement that only remembers."""

import numpy as np
import pytest

from moeless.control.controller import Controller, ControllerConfig
from moeless.core.clock import ManualClock
from moeless.core.events import PlanFailed, PlanMade
from moeless.core.plan import Plan, diff_plan
from moeless.core.policy_set import PolicySet
from moeless.errors import PlanError
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.telemetry.memory import MemorySink

LAYERS, EXPERTS, DEVICES = 4, 3, 2


class Placement:
    num_devices = DEVICES

    def __init__(self):
        self.planned_LED = np.zeros((LAYERS, EXPERTS, DEVICES), dtype=np.uint8)
        self.alive_LED = np.zeros_like(self.planned_LED)
        self.applied = []

    def alive_ED(self, layer):
        return self.alive_LED[layer].copy()

    def planned_ED(self, layer):
        return self.planned_LED[layer].copy()

    def capacity_D(self, layer):
        return np.array([3, layer])

    def speed_D(self):
        return None

    def apply(self, plan, *, decision_s):
        diff = diff_plan(
            plan, previous_ED=self.planned_LED[plan.layer], warm_ED=self.alive_LED[plan.layer]
        )
        self.planned_LED[plan.layer] = plan.replicas_ED
        self.applied.append((plan.step, plan.layer, plan.load_E.tolist(), decision_s))
        return diff


class Planner:
    """Seats all experts on device 0, and takes a while; raises what it is told to."""

    def __init__(self, clock):
        self.clock = clock
        self.requests = []
        self.error = None
        self.shape = (EXPERTS, DEVICES)

    def plan(self, request):
        self.requests.append(request)
        self.clock.advance(0.25)
        if self.error is not None:
            raise self.error
        replicas_ED = np.zeros(self.shape, dtype=np.uint8)
        replicas_ED[:, 0] = 1
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=replicas_ED,
            load_E=request.load_E,
        )


class Parts:
    def __init__(self, lookahead=0, predictor=None, planner=Planner, **policies):
        self.clock = ManualClock(100.0)
        self.placement = Placement()
        self.planner = planner(self.clock)
        self.history = predictor or PreviousPredictor()
        self.sink = MemorySink()
        self.controller = Controller(
            ControllerConfig(
                model="m", num_layers=LAYERS, num_experts=EXPERTS, lookahead=lookahead
            ),
            policies=PolicySet(
                name="test",
                planner=self.planner,
                splitter=EvenSplitter(),
                history=self.history,
                **policies,
            ),
            placement=self.placement,
            clock=self.clock,
            sink=self.sink,
        )

    def planned(self):
        return [(step, layer) for step, layer, _, _ in self.placement.applied]


def load(*tokens):
    return np.array(tokens, dtype=np.float64)


def test_at_the_start_every_layer_is_planned_for_equal_loads():
    parts = Parts()
    parts.controller.start()
    assert parts.placement.applied == [(0, layer, [1, 1, 1], 0.25) for layer in range(LAYERS)]


def test_without_lookahead_each_load_plans_the_next_step_of_its_layer():
    parts = Parts()
    parts.controller.observe(step=7, layer=2, load_E=load(5, 0, 1))
    assert parts.placement.applied == [(8, 2, [5, 0, 1], 0.25)]


def test_with_lookahead_only_the_layers_it_cannot_see_are_planned_from_history():
    parts = Parts(lookahead=2)
    for layer in range(LAYERS):
        parts.controller.observe(step=3, layer=layer, load_E=load(layer, 1, 1))
    assert parts.planned() == [(4, 0), (4, 1)]
    parts.controller.forecast(step=4, layer=2, load_E=load(0, 9, 0))
    assert parts.placement.applied[-1] == (4, 2, [0, 9, 0], 0.25)


def test_what_a_forecast_is_expected_to_misplace_reaches_the_planner_and_the_event():
    parts = Parts(lookahead=1)
    parts.controller.forecast(step=1, layer=1, load_E=load(1, 2, 3), expected_error=0.25)
    parts.controller.forecast(step=1, layer=2, load_E=load(1, 2, 3))
    parts.controller.observe(step=1, layer=0, load_E=load(1, 2, 3))
    expected = [0.25, None, None]
    assert [request.expected_error for request in parts.planner.requests] == expected
    assert [event.expected_error for event in parts.sink.of(PlanMade)] == expected


def test_the_planner_sees_the_plan_in_force_what_is_alive_and_the_capacities():
    parts = Parts()
    parts.placement.alive_LED[3, 1, 1] = 1
    parts.controller.forecast(step=1, layer=3, load_E=load(1, 2, 3))
    parts.controller.forecast(step=2, layer=3, load_E=load(1, 2, 3))
    first, second = parts.planner.requests
    assert not first.previous_ED.any()
    assert second.previous_ED[:, 0].all()
    assert first.alive_ED.tolist() == [[0, 0], [0, 1], [0, 0]]
    assert first.capacity_D.tolist() == [3, 3]


def test_an_event_says_what_a_plan_changed_and_how_long_it_took():
    parts = Parts()
    parts.placement.alive_LED[1, 0, 0] = 1
    parts.placement.planned_LED[1, 2, 1] = 1
    parts.controller.forecast(step=5, layer=1, load_E=load(1, 1, 1))
    assert parts.sink.events == (
        PlanMade(
            time_s=100.25,
            model="m",
            step=5,
            layer=1,
            plan_s=0.25,
            started=2,
            retired=1,
            kept=1,
            replicas=3,
        ),
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PlanError("too small"), "too small"),
        (ZeroDivisionError("division by zero"), "division by zero"),
        (KeyError(), "KeyError"),
    ],
)
def test_whatever_a_planner_raises_leaves_the_plan_in_force(error, reason):
    parts = Parts()
    parts.controller.forecast(step=1, layer=1, load_E=load(1, 1, 1))
    before = parts.placement.planned_LED.copy()
    parts.planner.error = error
    parts.controller.forecast(step=2, layer=1, load_E=load(9, 1, 1))
    assert (parts.placement.planned_LED == before).all()
    failed = parts.sink.of(PlanFailed)
    assert [(e.step, e.layer, e.reason) for e in failed] == [(2, 1, reason)]
    parts.planner.error = None
    parts.controller.forecast(step=3, layer=1, load_E=load(9, 1, 1))
    assert parts.planned() == [(1, 1), (3, 1)]


def test_a_plan_for_other_devices_is_not_put_in_force():
    parts = Parts()
    parts.planner.shape = (EXPERTS, DEVICES + 1)
    parts.controller.start()
    assert parts.placement.applied == []
    assert "replicas [3, 3], expected [3, 2]" in parts.sink.of(PlanFailed)[0].reason


def test_a_predictor_that_raises_costs_a_plan_and_nothing_else():
    class Broken:
        def observe(self, *, step, layer, load_E):
            raise RuntimeError("out of ideas")

        def predict(self, *, step, layer):
            raise AssertionError("never asked")

    parts = Parts(predictor=Broken())
    parts.controller.observe(step=1, layer=0, load_E=load(1, 1, 1))
    assert parts.placement.applied == []
    assert parts.sink.of(PlanFailed)[0].reason == "out of ideas"


def test_a_predictor_that_knows_nothing_yet_gives_no_plan():
    class Silent:
        def observe(self, *, step, layer, load_E):
            pass

        def predict(self, *, step, layer):
            return None

    parts = Parts(predictor=Silent())
    parts.controller.observe(step=1, layer=0, load_E=load(1, 1, 1))
    assert parts.sink.events == ()


def test_a_policy_that_does_not_use_forecasts_plans_every_layer_from_history():
    parts = Parts(lookahead=1, uses_forecasts=False)
    parts.controller.forecast(step=1, layer=2, load_E=load(9, 0, 0))
    assert parts.planned() == []
    parts.controller.observe(step=1, layer=2, load_E=load(1, 2, 3))
    assert parts.planned() == [(2, 2)]


def test_with_an_interval_each_layer_is_planned_from_history_once_per_interval():
    parts = Parts(lookahead=1, replan_every_s=60.0)
    parts.controller.start()
    del parts.placement.applied[:]
    for step in range(1, 5):
        parts.clock.advance(25.0)
        parts.controller.forecast(step=step, layer=3, load_E=load(9, 9, 9))
        for layer in (0, 3):
            parts.controller.observe(step=step, layer=layer, load_E=load(step, 0, 0))
    # Loads of the third step are the first after the interval; the fourth is too early again.
    assert [(s, at, e) for s, at, e, _ in parts.placement.applied] == [
        (4, 0, [3, 0, 0]),
        (4, 3, [3, 0, 0]),
    ]


def test_what_is_observed_between_plans_reaches_the_history():
    class Sum:
        total = 0.0

        def observe(self, *, step, layer, load_E):
            self.total = self.total + load_E

        def predict(self, *, step, layer):
            return self.total

    parts = Parts(predictor=Sum(), replan_every_s=10.0)
    parts.controller.start()
    parts.controller.observe(step=1, layer=0, load_E=load(1, 0, 0))
    parts.clock.advance(20.0)
    parts.controller.observe(step=2, layer=0, load_E=load(0, 2, 0))
    assert parts.placement.applied[-1][2] == [1, 2, 0]


def test_planners_are_asked_with_the_speeds_that_devices_have_shown():
    parts = Parts()
    parts.placement.speed_D = lambda: np.array([1.0, 0.5])
    parts.controller.start()
    assert [request.speed_D.tolist() for request in parts.planner.requests] == [
        [1.0, 0.5]
    ] * LAYERS


def test_a_controller_for_other_devices_goes_on_from_the_history_of_the_one_before():
    first, second = Parts(), Parts()
    first.controller.observe(step=1, layer=0, load_E=np.array([5.0, 1.0, 0.0]))
    second.controller.inherit(first.controller)
    second.controller.observe(step=2, layer=1, load_E=np.ones(EXPERTS))
    history = first.history
    assert history.predict(step=3, layer=0).tolist() == [5.0, 1.0, 0.0]
    assert history.predict(step=3, layer=1).tolist() == [1.0, 1.0, 1.0]


class Heir(Planner):
    """Searches never, and says whose loads it has."""

    def __init__(self, clock):
        super().__init__(clock)
        self.earlier = None

    def inherit(self, earlier):
        self.earlier = earlier

    def observe(self, *, step, layer, load_E):
        pass

    def search_due(self, layer):
        return False

    def begin_search(self, layer):
        return lambda: lambda: None

    def stands(self, layer):
        return False


@pytest.mark.parametrize(("kind", "is_heir"), [(Heir, True), (Planner, False)])
def test_a_planner_inherits_the_loads_of_one_of_its_kind_only(kind, is_heir):
    first, second = Parts(planner=kind), Parts(planner=Heir)
    second.controller.inherit(first.controller)
    assert (second.planner.earlier is first.planner) == is_heir
