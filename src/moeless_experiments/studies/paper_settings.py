"""Figures 13 to 16: the paper's two settings, each seen in layer time and in replicas."""

from collections.abc import Sequence
from typing import Final

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Result
from moeless_experiments.studies.comparison import NAMES
from moeless_experiments.studies.replay_traces import (
    FORECASTER,
    MIXTRAL,
    PHI,
    SCOUT,
    Workload,
    demo_workloads,
    steps_of,
)
from moeless_experiments.studies.replays import A6000, DEFAULT, DEVICES, PAPER, Case
from moeless_experiments.studies.sweeps import (
    Line,
    Metric,
    Swept,
    blocking_loads,
    cold_starts,
    lines_of,
    listed,
    mean_ms,
    memory_factor,
    replicas,
    straggler_ratio,
    sweep,
    verdict,
)
from moeless_experiments.summary import span, spread

_MODELS: Final = (Workload(MIXTRAL), Workload(PHI, 1.2), Workload(SCOUT, 1.2))
_CLEAR = 0.001
"""Changes below a tenth of a percent say nothing."""

ACCURACY: Final = (0.92, 0.89, 0.87, 0.85, 0.84)
"""Load accuracy of copied gates by distance, measured on the demo model with 16 experts."""

_LOST_PER_SIGMA = 0.4
"""Noise of sigma misplaces about so many tokens per token: half of E|exp(sigma z) - 1|."""

_NEXT_TO_NOTHING: Final = 0.005
"""Change of the mean straggler ratio."""

_LABELS: dict[Metric, str] = {mean_ms: "mean layer time (ms)", replicas: "replicas of a layer"}


def sigma_of(distance: int) -> float:
    """The noise that loses as much load accuracy as copied gates do at a distance."""
    return round((1 - ACCURACY[distance - 1]) / _LOST_PER_SIGMA, 3)


def _farther(case: Case, distance: float) -> Case:
    """Forecasts recorded at the distance where there are some, else noise of its size."""
    near = int(distance)
    if case.workload.model.startswith("demo"):
        load = case.workload._replace(ahead=near)
        return case._replace(workload=load, distance=near, prediction="recorded")
    return case._replace(distance=near, prediction=f"noisy:{sigma_of(near)}")


def _looser(case: Case, threshold: float) -> Case:
    return case._replace(cv_threshold=threshold)


def distances(context: Context) -> Swept:
    """The sweep over the prediction distance."""
    values = (1, 3, 5) if context.quick else (1, 2, 3, 4, 5)
    loads = (*_MODELS, *demo_workloads(context, "arena"))
    lines = lines_of(loads, (PAPER, DEFAULT), (A6000,))
    return sweep(context, "prediction_distance", values, lines, _farther)


def thresholds(context: Context) -> Swept:
    """The sweep over the CV threshold."""
    values = (0.2, 0.6, 1.0) if context.quick else (0.2, 0.4, 0.6, 0.8, 1.0)
    loads = (*_MODELS, *demo_workloads(context, "arena"))
    return sweep(context, "cv_threshold", values, lines_of(loads, (PAPER,), (A6000,)), _looser)


def by_distance(number: str, metric: Metric) -> Experiment:
    """Figure 13 or 14."""
    rises = metric is mean_ms
    claim = (
        "As the prediction distance increases, the MoE layer forward time rises."
        if rises
        else "As the prediction distance increases, the number of expert replicas decreases."
    )

    def run(context: Context) -> Result:
        swept = distances(context)
        found = {name: swept.changes(name, metric) for name in (PAPER, DEFAULT)}
        text = "; ".join(f"{NAMES[n]} {spread(each.values())}" for n, each in found.items())
        first, last = swept.values[0], swept.values[-1]
        full = [swept.found[line][0].figures["memory_factor"] / 2 for line in swept.lines(PAPER)]
        sign = 1 if rises else -1
        held = {n: [sign * c > _CLEAR for c in each.values()] for n, each in found.items()}
        what = "mean layer time" if rises else "mean replicas"
        return Result(
            provenance="simulated",
            tables=(swept.table(),),
            plots=(swept.plot(metric, _LABELS[metric]),),
            findings=tuple(
                Finding(
                    what=f"{what} at d = {last:g} against d = {first:g}, {NAMES[name]}",
                    paper="rises" if rises else "decreases",
                    ours=f"{spread(each.values())}; {sum(held[name])} as the paper says",
                    cases=listed(each),
                    why=_why_distance(swept, name, held[name]),
                    verdict=verdict(held[name]),
                )
                for name, each in found.items()
            ),
            interpretation=(
                f"From d = {first:g} to {last:g} the {what} changes by workload so: {text}. "
                "A larger distance makes forecasts worse, and gives loads more time to end. On "
                "the demo models forecasts are recorded at each distance, of the paper's "
                f"predictor ({FORECASTER}), fitted to other prompts where there are some. There "
                "is no recording of the paper's three models: their forecasts are exact loads "
                "with noise of the size that copied gates have on a demo model (sigma "
                f"{sigma_of(int(first)):g} to {sigma_of(int(last)):g}). At d = {first:g} "
                f"the printed policy holds {span(full, '.0%')} of its memory cap, and that is "
                "how far errors can change the number of replicas. "
                f"{_why_distance(swept, DEFAULT, [])}."
            ),
            config={
                "devices": DEVICES,
                "load_accuracy": list(ACCURACY),
                "sigma": [sigma_of(d) for d in range(1, 6)],
                "recorded_forecasts": FORECASTER,
                "steps": steps_of(context, _MODELS[0]),
            },
        )

    title = "Layer time" if rises else "Replicas"
    return Experiment(id=number, title=f"{title} by prediction distance", claim=claim, run=run)


def _why_distance(swept: Swept, policy: str, held: Sequence[bool]) -> str:
    """What moves from the first to the last distance, and what it comes to."""
    if held and all(held):
        return ""
    lines = swept.lines(policy)
    ratio = [
        swept.series(each, straggler_ratio)[-1] - swept.series(each, straggler_ratio)[0]
        for each in lines
    ]
    waits = [
        swept.series(each, blocking_loads)[-1] - swept.series(each, blocking_loads)[0]
        for each in lines
    ]
    loads = span((max(swept.series(each, cold_starts)) for each in lines), ".3f")
    text = (
        f"{NAMES[policy]}: the mean straggler ratio changes by {span(ratio, '+.3f')} and loads "
        f"that tokens wait for by {span(waits, '+.4f')} per layer-step, with at most {loads} "
        "loads per layer-step"
    )
    if max(map(abs, ratio)) < _NEXT_TO_NOTHING:
        return f"{text}: forecasts decide next to nothing where tokens are split afterwards"
    if min(waits) < 0.0 < max(ratio):
        return f"{text}: more lead lets loads end in time, which works against worse forecasts"
    if min(ratio) < 0.0:
        return f"{text}: the rule gives a better balance with some worse forecasts"
    return text


def by_threshold(number: str, metric: Metric) -> Experiment:
    """Figure 15 or 16."""
    rises = metric is mean_ms
    claim = (
        "A larger CV threshold increases the MoE layer forward time."
        if rises
        else "A larger CV threshold reduces the number of expert replicas per layer."
    )

    def run(context: Context) -> Result:
        swept = thresholds(context)
        found = swept.changes(PAPER, metric)
        first, last = swept.values[0], swept.values[-1]
        sign = 1 if rises else -1
        held = [sign * change > _CLEAR for change in found.values()]
        other = [line for line, right in zip(found, held, strict=True) if not right]
        what = "mean layer time" if rises else "mean replicas"
        return Result(
            provenance="simulated",
            tables=(swept.table(),),
            plots=(swept.plot(metric, _LABELS[metric]),),
            findings=(
                Finding(
                    what=f"{what} at V = {last:g} against V = {first:g}, {NAMES[PAPER]}",
                    paper="increases" if rises else "decreases",
                    ours=f"{spread(found.values())}; {sum(held)} as the paper says",
                    cases=listed(found),
                    why=_why_threshold(swept, other),
                    verdict=verdict(held),
                ),
            ),
            interpretation=(
                f"From V = {first:g} to {last:g} the {what} of the printed policy changes by "
                f"{span(found.values(), '+.1%')} by workload; {sum(held)} of {len(held)} move as "
                "the paper says"
                + ("." if not other else f", not {'; '.join(o.workload.label for o in other)}.")
                + f" {_compare_ends(swept, swept.lines(PAPER))}. V bounds the variation of "
                "replica loads, while a layer waits for its slowest device."
            ),
            config={"devices": DEVICES, "steps": steps_of(context, _MODELS[0])},
        )

    title = "Layer time" if rises else "Replicas"
    return Experiment(id=number, title=f"{title} by CV threshold", claim=claim, run=run)


def _compare_ends(swept: Swept, lines: Sequence[Line]) -> str:
    """Balance and replicas at both ends."""
    ends = []
    for place in (0, -1):
        ratios = span(swept.series(each, straggler_ratio)[place] for each in lines)
        counts = span(swept.series(each, memory_factor)[place] for each in lines)
        ends.append(
            f"at V = {swept.values[place]:g} a mean straggler ratio of {ratios} with {counts} "
            "replicas per expert"
        )
    text = ", ".join(ends)
    return text[0].upper() + text[1:]


def _why_threshold(swept: Swept, other: Sequence[Line]) -> str:
    """Of the workloads that do not move as the paper says."""
    if not other:
        return ""
    text = f"where it does not: {_compare_ends(swept, other)}"
    fewer = [
        swept.series(each, memory_factor)[-1] < swept.series(each, memory_factor)[0] - _CLEAR
        for each in other
    ]
    better = [
        swept.series(each, straggler_ratio)[-1] < swept.series(each, straggler_ratio)[0]
        for each in other
    ]
    if any(few and good for few, good in zip(fewer, better, strict=True)):
        return f"{text}: with fewer replicas the printed placer leaves less imbalance"
    if not any(fewer):
        return f"{text}: no replica is scaled away, as all are kept alive or none was needed"
    return text
