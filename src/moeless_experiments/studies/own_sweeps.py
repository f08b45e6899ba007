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
    lines_of,
    mean_ms,
    resident,
    sweep,
)

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
        remark: A reason to end the interpretation with.
    """

    id: str
    title: str
    asked: str
    setting: str
    values: tuple[float, ...]
    quick: tuple[float, ...]
    vary: Callable[[Case, float], Case]
    remark: str
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
                    what=f"{question.label} of {NAMES[each]} by {name}",
                    ours=_series(swept, each, question.metric),
                )
                for each in question.policies
            ),
            *(
                Finding(
                    what=f"mean layer time of {NAMES[DEFAULT]} against {NAMES[other]} by {name}",
                    ours=_against(swept, other),
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


def _series(swept: Swept, policy: str, metric: Metric) -> str:
    return "; ".join(
        f"{line.workload.label}, {HARDWARE[line.hardware]}: "
        + ", ".join(
            f"{value:g}: {each:.4g}"
            for value, each in zip(swept.values, swept.series(line, metric), strict=True)
        )
        for line in swept.lines(policy)
    )


def _against(swept: Swept, other: str) -> str:
    return "; ".join(
        f"{line.workload.label}, {HARDWARE[line.hardware]}: "
        + ", ".join(f"{v:g}: {c:+.1%}" for v, c in zip(swept.values, changes, strict=True))
        for line, changes in swept.against(DEFAULT, other, mean_ms).items()
    )


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
        f"{'; '.join(compared)}. {question.remark}"
    )


PAUSES: Final = Question(
    id="pauses",
    title="Memory and waiting by keep-alive, under traffic with pauses",
    asked="what does scaling to zero save where traffic pauses, and what does it cost?",
    setting="keep_alive_s",
    values=(1.0, 3.0, 10.0, 30.0, 60.0, 300.0),
    quick=(1.0, 10.0, 60.0),
    vary=lambda case, value: case._replace(keep_alive_s=value),
    remark="Resident cost falls only when experts leave between requests, and then the next "
    "request waits for its experts: memory is bought with waiting, which the mean layer time "
    "includes. Static parallelism and EPLB keep everything whatever the keep-alive.",
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
    remark="Replicas beyond what connects all devices through the experts that carry load add "
    "little.",
    demo=True,
)
