"""The state machine of an instance: every step from every state."""

import pytest

from moeless.core.model import FunctionId
from moeless.errors import TransitionError
from moeless.functions.pool.lifecycle import TRANSITIONS, Instance, State, Step

LEGAL = {
    ("cold", "load"): "loading",
    ("loading", "loaded"): "warm",
    ("loading", "failed"): "cold",
    ("warm", "begin"): "busy",
    ("busy", "finish"): "warm",
    ("warm", "drain"): "draining",
    ("draining", "evicted"): "cold",
    ("loading", "lost"): "cold",
    ("warm", "lost"): "cold",
    ("busy", "lost"): "cold",
    ("draining", "lost"): "cold",
}


def instance_in(state):
    return Instance(function=FunctionId("m", 1, 2), device=3, num_bytes=10, state=state)


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("state", State)
def test_a_step_leads_where_the_table_says_or_is_refused(state, step):
    instance = instance_in(state)
    after = LEGAL.get((state.value, step.value))
    if after is None:
        with pytest.raises(TransitionError) as caught:
            instance.take(step, now_s=5.0)
        assert state.value in str(caught.value)
        assert step.value in str(caught.value)
        assert "device 3" in str(caught.value)
        assert (instance.state, instance.since_s) == (state, 0.0)
    else:
        instance.take(step, now_s=5.0)
        assert (instance.state, instance.since_s) == (State(after), 5.0)


def test_the_table_holds_no_other_transition():
    assert {(s.value, t.value): a.value for (s, t), a in TRANSITIONS.items()} == LEGAL


@pytest.mark.parametrize("step", Step)
def test_only_becoming_warm_or_finishing_work_counts_as_use(step):
    for state in State:
        if (state, step) in TRANSITIONS:
            instance = instance_in(state)
            instance.take(step, now_s=7.0)
            used = step in (Step.LOADED, Step.FINISH)
            assert instance.idle_since_s == (7.0 if used else 0.0)
