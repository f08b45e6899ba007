"""Settings that the paper does not vary: what they do to layer time, loads and cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Result
from moeless_experiments.studies.comparison import NAMES
from moeless_experiments.studies.replay_traces import (
    MIXTRAL,
    PHI,
    SPARSE,
    Workload,
    demo_workloads,
    steps_of,
)
from moeless_experiments.studies.replays import (
    A6000,
    AUTOMATIC,
    DEFAULT,
    DEVICES,
    EPLB,
    HARDWARE,
    PAPER,
    STATIC,
    Case,
)
from moeless_experiments.studies.sweeps import (
    Metric,
    Swept,
    blocking_loads,
    lines_of,
    mean_ms,
    memory_factor,
    resident,
    sweep,
)
from moeless_experiments.summary import span, spread

_SAME: Final = 0.002
"""Part of a mean by which rounding differs."""

_LOADS: Final = (Workload(MIXTRAL), Workload(PHI, 1.2))


@dataclass(frozen=True, kw_only=True)
class Question:
    """One of our own sweeps.

    Args:
        id: Of the experiment.
        title: What it shows.
        asked: The question.
        setting: What is varied, with its unit.
        values: Its values.
        quick: Fewer of them.
        vary: Puts one into a case.
        loads: Workloads.
        demo: Whether demo models are replayed as well.
        policies: Systems.
        machines: Time models.
        metric: What is drawn.
        label: Its name.
        log: Whether the axis is logarithmic.
        remark: What to end the interpretation with, from what was found.
    """

    id: str
    title: str
    asked: str
    setting: str
    values: tuple[float, ...]
    quick: tuple[float, ...]
    vary: Callable[[Case, float], Case]
    remark: Callable[[Swept], str]
    loads: tuple[Workload, ...] = _LOADS
    demo: bool = False
    policies: tuple[str, ...] = (STATIC, EPLB, PAPER, DEFAULT)
    machines: tuple[str, ...] = (A6000,)
    metric: Metric = mean_ms
    label: str = "mean layer time (ms)"
    log: bool = False


def ask(question: Question) -> Experiment:
    """The experiment of a question."""
    return Experiment(
        id=question.id,
        title=question.title,
        claim=f"Not in the paper: {question.asked}",
        run=lambda context: _run(context, question),
    )


def _run(context: Context, question: Question) -> Result:
    values = question.quick if context.quick else question.values
    loads = (*question.loads, *(demo_workloads(context, "arena") if question.demo else ()))
    lines = lines_of(loads, question.policies, question.machines)
    swept = sweep(context, question.setting, values, lines, question.vary)
    name = question.setting.replace("_", " ")
    others = [each for each in question.policies if each != DEFAULT]
    return Result(
        provenance="simulated",
        tables=(swept.table(),),
        plots=(swept.plot(question.metric, question.label, log=question.log),),
        findings=(
            *(
                Finding(
                    what=f"{question.label} of {NAMES[each]} from {name} {values[0]:g} to "
                    f"{values[-1]:g}",
                    ours=spread(swept.changes(each, question.metric).values()),
                    cases=_series(swept, each, question.metric),
                )
                for each in question.policies
            ),
            *(
                Finding(
                    what=f"mean layer time of {NAMES[DEFAULT]} against {NAMES[other]} by {name}",
                    ours=spread(
                        change
                        for each in swept.against(DEFAULT, other, mean_ms).values()
                        for change in each
                    ),
                    cases=_against(swept, other),
                )
                for other in others
            ),
        ),
        interpretation=_interpret(swept, question, others),
        config={
            "devices": DEVICES,
            "machines": [HARDWARE[each] for each in question.machines],
            "values": list(values),
            "steps": [steps_of(context, load) for load in loads],
        },
    )


def _series(swept: Swept, policy: str, metric: Metric) -> dict[str, str]:
    return {
        f"{line.workload.label}, {HARDWARE[line.hardware]}": ", ".join(
            f"{value:g}: {each:.4g}"
            for value, each in zip(swept.values, swept.series(line, metric), strict=True)
        )
        for line in swept.lines(policy)
    }


def _against(swept: Swept, other: str) -> dict[str, str]:
    return {
        f"{line.workload.label}, {HARDWARE[line.hardware]}": ", ".join(
            f"{v:g}: {c:+.1%}" for v, c in zip(swept.values, changes, strict=True)
        )
        for line, changes in swept.against(DEFAULT, other, mean_ms).items()
    }


def _interpret(swept: Swept, question: Question, others: Sequence[str]) -> str:
    first, last = swept.values[0], swept.values[-1]
    name = question.setting.replace("_", " ")
    moved = "; ".join(
        f"{NAMES[each]} {min(changes):+.1%} to {max(changes):+.1%}"
        for each in question.policies
        if (changes := list(swept.changes(each, mean_ms).values()))
    )
    if question.metric is not mean_ms:
        moved += f"; {question.label}: " + "; ".join(
            f"{NAMES[each]} {min(changes):+.1%} to {max(changes):+.1%}"
            for each in question.policies
            if (changes := list(swept.changes(each, question.metric).values()))
        )
    compared = []
    for other in others:
        changes = [
            change for each in swept.against(DEFAULT, other, mean_ms).values() for change in each
        ]
        compared.append(
            f"{NAMES[other]} {min(changes):+.1%} to {max(changes):+.1%} "
            f"(slower in {sum(change > 0.002 for change in changes)} of {len(changes)})"
        )
    return (
        f"From {name} {first:g} to {last:g} the mean layer time changes, by workload, so: "
        f"{moved}. The default against the others over all values: "
        f"{'; '.join(compared)}. {question.remark(swept)}"
    )


def _remark_on_pauses(swept: Swept) -> str:
    """Memory, waiting and time at both ends, of the default and of those who keep everything."""
    texts = []
    for line in swept.lines(DEFAULT):
        cost, time, waits = (
            swept.series(line, metric) for metric in (resident, mean_ms, blocking_loads)
        )
        static = swept.series(line._replace(policy=STATIC), resident)
        texts.append(
            f"{line.workload.label}: with {swept.values[0]:g} s the default takes "
            f"{cost[0] / static[0]:.0%} of static's resident cost and {waits[0]:.2f} loads per "
            f"layer-step are waited for, with {swept.values[-1]:g} s {cost[-1] / static[-1]:.0%} "
            f"and {waits[-1]:.2f}; the mean layer time is {time[0] / time[-1]:.2f} times as long"
        )
    fixed = max(
        abs(change) for name in (STATIC, EPLB) for change in swept.changes(name, resident).values()
    )
    kept = (
        "Static parallelism and EPLB keep everything whatever the keep-alive"
        if fixed < _SAME
        else f"The resident cost of static parallelism and EPLB changes by up to {fixed:.1%}"
    )
    return f"{'; '.join(texts)}. {kept}."


def _remark_on_memory(swept: Swept) -> str:
    """Which part of what memory buys is bought by the first half of it."""
    halves = []
    for line in swept.lines(DEFAULT):
        times = swept.series(line, mean_ms)
        middle = times[len(times) // 2]
        if times[0] - times[-1] > _SAME * times[0]:
            halves.append((times[0] - middle) / (times[0] - times[-1]))
    gained = (
        f"Of what the default gains from {swept.values[0]:g} to {swept.values[-1]:g} times the "
        f"experts, {span(halves, '.0%')} is there at {swept.values[len(swept.values) // 2]:g}"
        if halves
        else "The default gains nothing from more memory"
    )
    taken, slower = [], []
    for line in swept.lines(AUTOMATIC):
        taken.append(swept.series(line, memory_factor)[0])
        best = min(swept.series(line._replace(policy=DEFAULT), mean_ms))
        slower.append(swept.series(line, mean_ms)[0] / best - 1.0)
    return (
        f"{gained}. Left to the policy (which is the same at every value here), memory is "
        f"{span(taken)} times the experts, and the mean layer time {span(slower, '+.1%')} against "
        "the best of these."
    )


PAUSES: Final = Question(
    id="pauses",
    title="Memory and waiting by keep-alive, under traffic with pauses",
    asked="what does scaling to zero save where traffic pauses, and what does it cost?",
    setting="keep_alive_s",
    values=(1.0, 3.0, 10.0, 30.0, 60.0, 300.0),
    quick=(1.0, 10.0, 60.0),
    vary=lambda case, value: case._replace(keep_alive_s=value),
    remark=lambda swept: _remark_on_pauses(swept),
    loads=(Workload(MIXTRAL, None, SPARSE),),
    metric=resident,
    label="resident cost (GB s)",
    log=True,
)
MEMORY: Final = Question(
    id="memory",
    title="Layer time by memory",
    asked="how much balance does how much memory buy?",
    setting="memory_factor",
    values=(1.0, 1.25, 1.5, 1.75, 2.0),
    quick=(1.0, 1.25, 1.5, 2.0),
    vary=lambda case, value: case._replace(memory_factor=value),
    remark=lambda swept: _remark_on_memory(swept),
    policies=(STATIC, EPLB, PAPER, DEFAULT, AUTOMATIC),
    demo=True,
)
