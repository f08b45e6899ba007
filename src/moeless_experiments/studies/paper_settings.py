"""Figures 13 to 16: the paper's two settings, each seen in layer time and in replicas."""

from typing import Final

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Result
from moeless_experiments.studies.comparison import NAMES
from moeless_experiments.studies.replay_traces import (
    MIXTRAL,
    PHI,
    SCOUT,
    Workload,
    demo_workloads,
    steps_of,
)
from moeless_experiments.studies.replays import A6000, DEFAULT, DEVICES, PAPER, Case
from moeless_experiments.studies.sweeps import (
    Metric,
    Swept,
    lines_of,
    listed,
    mean_ms,
    replicas,
    sweep,
    verdict,
)

_MODELS: Final = (Workload(MIXTRAL), Workload(PHI, 1.2), Workload(SCOUT, 1.2))
_CLEAR = 0.001
"""Changes below a tenth of a percent say nothing."""

ACCURACY: Final = (0.92, 0.89, 0.87, 0.85, 0.84)
"""Load accuracy of copied gates by distance, measured on the demo model with 16 experts."""

_LOST_PER_SIGMA = 0.4
"""Noise of sigma misplaces about so many tokens per token: half of E|exp(sigma z) - 1|."""

_LABELS: dict[Metric, str] = {mean_ms: "mean layer time (ms)", replicas: "replicas of a layer"}


def sigma_of(distance: int) -> float:
    """The noise that loses as much load accuracy as copied gates do at a distance."""
    return round((1 - ACCURACY[distance - 1]) / _LOST_PER_SIGMA, 3)


def _farther(case: Case, distance: float) -> Case:
    near = int(distance)
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
        first, last = swept.values[0], swept.values[-1]
        full = [swept.found[line][0].figures["memory_factor"] / 2 for line in swept.lines(PAPER)]
        sign = 1 if rises else -1
        held = {n: [sign * c > _CLEAR for c in each.values()] for n, each in found.items()}
        text = "; ".join(
            f"{NAMES[name]} {min(each.values()):+.1%} to {max(each.values()):+.1%} "
            f"({sum(held[name])} of {len(each)} as the paper says)"
            for name, each in found.items()
        )
        what = "mean layer time" if rises else "mean number of replicas"
        return Result(
            provenance="simulated",
            tables=(swept.table(),),
            plots=(swept.plot(metric, _LABELS[metric]),),
            findings=tuple(
                Finding(
                    what=f"{what} at d = {last:g} against d = {first:g}, {NAMES[name]}",
                    paper="rises" if rises else "decreases",
                    ours=listed(each),
                    why="" if all(held[name]) else _WHY_DISTANCE[name],
                    verdict=verdict(held[name]),
                )
                for name, each in found.items()
            ),
            interpretation=(
                f"From d = {first:g} to {last:g} the {what} changes by workload so: {text}. "
                "A larger distance makes forecasts worse, which is put in as noise of the size "
                f"that copied gates have on the demo model (sigma {sigma_of(1):g} to "
                f"{sigma_of(int(last)):g}), and gives loads more time to end. At d = {first:g} "
                f"the printed policy holds {min(full):.0%} to {max(full):.0%} of its memory cap, "
                "so that errors can hardly change how many replicas there are. The default splits "
                "tokens after the gate has spoken, with a standing set of replicas."
            ),
            config={
                "devices": DEVICES,
                "load_accuracy": list(ACCURACY),
                "sigma": [sigma_of(d) for d in range(1, 6)],
                "steps": steps_of(context, _MODELS[0]),
            },
        )

    title = "Layer time" if rises else "Replicas"
    return Experiment(id=number, title=f"{title} by prediction distance", claim=claim, run=run)


_WHY_DISTANCE = {
    PAPER: "more lead lets more loads end in time, which works against worse forecasts; where "
    "warm replicas are reused wherever they are, a forecast decides little",
    DEFAULT: "a standing set of replicas and a split after the gate need no exact forecast",
}


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
        what = "mean layer time" if rises else "mean number of replicas"
        return Result(
            provenance="simulated",
            tables=(swept.table(),),
            plots=(swept.plot(metric, _LABELS[metric]),),
            findings=(
                Finding(
                    what=f"{what} at V = {last:g} against V = {first:g}, {NAMES[PAPER]}",
                    paper="increases" if rises else "decreases",
                    ours=listed(found),
                    why=""
                    if not other
                    else "with few replicas the printed placer has fewer devices to get wrong; "
                    "where the load varies less than the threshold nothing is scaled at all"
                    if rises
                    else "replicas that are kept alive count as long as they are warm",
                    verdict=verdict(held),
                ),
            ),
            interpretation=(
                f"From V = {first:g} to {last:g} the {what} of the printed policy changes by "
                f"{min(found.values()):+.1%} to {max(found.values()):+.1%} by workload; "
                f"{sum(held)} of {len(held)} move as the paper says"
                + ("." if not other else f", not {'; '.join(o.workload.label for o in other)}.")
                + " V bounds the variation of replica loads, while a layer waits for its "
                "slowest device: equal replicas on unequal numbers of devices are not balance."
            ),
            config={"devices": DEVICES, "steps": steps_of(context, _MODELS[0])},
        )

    title = "Layer time" if rises else "Replicas"
    return Experiment(id=number, title=f"{title} by CV threshold", claim=claim, run=run)
