"""The soak's own judgement: arrivals as they should be, and every criterion trips."""

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch):
    """The parts of the soak, which lie beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import chaos.arrivals
    import chaos.report
    import chaos.traffic

    yield chaos
    for name in [n for n in sys.modules if n.partition(".")[0] == "chaos"]:
        del sys.modules[name]


def stock(held):
    sizes = {"count": 1, "anonymous": held, "shared": 0, "file": 7}
    return {"other_bytes": held - 10, "expert_bytes": 10, "roles": {"engine": sizes}}


def report(chaos, **changes):
    figures = chaos.traffic.Outcome(first_s=[(0.0, 0.5)], per_token_s=[0.1], same=1).figures()
    before, after = stock(1010), stock(changes.pop("held", 1020))
    return {
        "minutes": 2,
        "peace_minutes": 1,
        "seed": 0,
        "arrivals": "none",
        "faults": {"kill": 4},
        "faults_wanted": 4,
        "peace": figures,
        "with_faults": figures,
        "afterwards": figures,
        "p99_ttft_ratio": 1.0,
        "p99_tpot_ratio": 1.0,
        "stood_still_s": {"peace": 0, "with_faults": 0},
        "memory_change": chaos.report.memory_change(before, after),
        "memory_before": before,
        "memory_after": after,
        "stopped_workers_left": [],
        "processes_left": 0,
    } | changes


def test_a_soak_without_problems_says_so(chaos):
    found = report(chaos)
    assert chaos.report.find_problems(found) == []
    assert chaos.report.to_table(found).endswith("no problems")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"held": 1050}, "memory changed by +4.0%"),
        ({"held": 950}, "memory changed by -6.0%"),
        ({"faults": {"kill": 3}}, "only 3 of 4 faults"),
        ({"stopped_workers_left": [7]}, "were left stopped"),
        ({"processes_left": 1}, "1 processes were left"),
    ],
)
def test_every_criterion_trips(chaos, changes, problem):
    found = report(chaos, **changes)
    (told,) = chaos.report.find_problems(found)
    assert problem in told
    assert told in chaos.report.to_table(found)


@pytest.mark.parametrize("field", ["failures", "wrong"])
def test_a_failed_or_wrong_answer_trips(chaos, field):
    outcome = chaos.traffic.Outcome(same=3, **{field: ["why"]})
    (told,) = chaos.report.find_problems(report(chaos, with_faults=outcome.figures()))
    assert "with_faults: 1" in told
    assert "why" in told


@pytest.mark.parametrize(
    ("tokens", "gap", "counted"),
    [
        (["a", "b", "c"], 1.0, "same"),
        (["a", "x", "c"], 0.5e-4, "close_calls"),
        (["a", "x", "c"], 2e-4, "wrong"),
        (["a", "b"], 0.0, "wrong"),
    ],
)
def test_an_answer_may_differ_only_where_two_logits_were_close(chaos, tokens, gap, counted):
    known = chaos.traffic.Reference(
        prompt="p", max_tokens=3, tokens=["a", "b", "c"], gaps=[1.0, gap, 1.0]
    )
    outcome = chaos.traffic.Outcome()
    chaos.traffic.judge(known, tokens, outcome)
    counts = {"same": outcome.same, "close_calls": outcome.close_calls}
    counts["wrong"] = len(outcome.wrong)
    assert [name for name, count in counts.items() if count] == [counted]


def test_arrivals_without_a_trace_are_bursty_and_repeatable(chaos):
    draw = chaos.arrivals.arrival_times
    times_s, source = draw(None, seconds=1200.0, count=6000, seed=3)
    assert "built-in" in source
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s[-1] <= 1200
    assert times_s == draw(None, seconds=1200.0, count=6000, seed=3)[0]
    counts = np.histogram(times_s, bins=240)[0]
    assert counts.var() > 3 * counts.mean()  # a Poisson process has 1
