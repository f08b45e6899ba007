"""Figure 17: parts of MoEless taken away, together and one by one."""

from collections.abc import Callable, Sequence

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Result
from moeless_experiments.studies.comparison import (
    NAMES,
    Found,
    cdf_plot,
    cdf_table,
    main_table,
    settings_of,
)
from moeless_experiments.studies.replay_traces import (
    MIXTRAL,
    PHI,
    Workload,
    demo_workloads,
    steps_of,
)
from moeless_experiments.studies.replay_variants import (
    JOINT,
    NO_PLACER,
    NO_PREDICTOR,
    NO_SCALER,
    NO_SPLITTER,
    WHOLE,
)
from moeless_experiments.studies.replays import (
    A6000,
    DEFAULT,
    DEVICES,
    HARDWARE,
    PAPER,
    STATIC,
    Case,
    Outcome,
    replay_all,
)
from moeless_experiments.studies.sweeps import verdict
from moeless_experiments.summary import listed, span, spread

_PAPER_WITHOUT = (NO_PREDICTOR, NO_SCALER, NO_PLACER, JOINT)
_DEFAULT_WITHOUT = (NO_PREDICTOR, NO_SCALER, NO_PLACER, NO_SPLITTER)
_CLEAR = 0.002


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    loads = (Workload(MIXTRAL), Workload(PHI, 1.2), *demo_workloads(context, "arena"))
    systems = [(STATIC, WHOLE)]
    systems += [(PAPER, part) for part in (WHOLE, *_PAPER_WITHOUT)]
    systems += [(DEFAULT, part) for part in (WHOLE, *_DEFAULT_WITHOUT)]
    found = replay_all(
        context,
        [Case(load, name, without=part) for load in loads for name, part in systems],
    )
    shown = {case: outcome for case, outcome in found.items() if case.policy != STATIC}
    return Result(
        provenance="simulated",
        tables=(main_table("ablation", found), cdf_table("distribution", found)),
        plots=(
            cdf_plot(
                "ablation",
                {case: each for case, each in shown.items() if case.without in (WHOLE, JOINT)},
                "Layer times of both policies whole (solid), and of the printed one without "
                "predictor, scaler and placer (dashed).",
            ),
        ),
        findings=(
            *(_finding(found, PAPER, part) for part in (JOINT, *_PAPER_WITHOUT[:-1])),
            *(_finding(found, DEFAULT, part) for part in _DEFAULT_WITHOUT),
        ),
        interpretation=_interpret(found),
        config={
            "devices": DEVICES,
            "machine": A6000,
            "steps": [steps_of(context, load) for load in loads],
            "no predictor": "the printed policy plans from EPLB's window of ten minutes, every "
            "ten minutes; the default from what was last observed",
            "no scaler": "one replica for each expert",
            "no placer": "replicas go round from their expert's own device; the default keeps "
            "the first set, which knows no loads",
            "no splitter": "tokens of an expert are divided evenly over its replicas",
        },
    )


def _changes(found: Found, policy: str, part: str) -> list[float]:
    return [
        found[Case(load, policy, each, without=part)].mean_ms
        / found[Case(load, policy, each)].mean_ms
        - 1.0
        for load, each in settings_of(found)
    ]


def _finding(found: Found, policy: str, part: str) -> Finding:
    changes = _changes(found, policy, part)
    paper = policy == PAPER
    slower = [value > _CLEAR for value in changes]
    return Finding(
        what=f"mean layer time: {NAMES[policy]}, {part}, against the whole",
        paper="higher (no number in the text)" if paper else "not in our copy",
        ours=spread(changes),
        cases=listed(
            {
                f"{load.label}, {HARDWARE[each]}": value
                for (load, each), value in zip(settings_of(found), changes, strict=True)
            }
        ),
        why="" if all(slower) or not paper else _why(found, part, slower),
        verdict=verdict(slower) if paper else None,
    )


def _why(found: Found, part: str, slower: Sequence[bool]) -> str:
    """Where taking a part away does not slow the printed policy down: what it changed there."""
    there = [w for w, held in zip(settings_of(found), slower, strict=True) if not held]
    whole = [found[Case(load, PAPER, each)] for load, each in there]
    rest = [found[Case(load, PAPER, each, without=part)] for load, each in there]
    static = [found[Case(load, STATIC, each)] for load, each in there]

    def both(figure: Callable[[Outcome], float], form: str = ".2f") -> str:
        return f"{span(map(figure, whole), form)} with, {span(map(figure, rest), form)} without"

    text = (
        f"where it is not slower: mean straggler ratio {both(lambda o: o.straggler_ratio)}; "
        f"replicas per expert {both(lambda o: float(o.figures['memory_factor']))}; loads per "
        f"layer-step {both(lambda o: float(o.figures['cold_starts_per_layer_step']), '.3f')}"
    )
    behind = sum(o.mean_ms > s.mean_ms * (1 + _CLEAR) for o, s in zip(whole, static, strict=True))
    if behind:
        text += (
            f"; in {behind} of these {len(there)} the whole is slower than static parallelism, so "
            "that there is something to win by taking it away"
        )
    return text


def _interpret(found: Found) -> str:
    def mean(policy: str, part: str) -> str:
        return f"{np.mean(_changes(found, policy, part)):+.1%}"

    apart = [
        abs(
            found[Case(load, PAPER, each, without=JOINT)].mean_ms
            / found[Case(load, STATIC, each)].mean_ms
            - 1.0
        )
        for load, each in settings_of(found)
    ]
    worst = max(_DEFAULT_WITHOUT, key=lambda part: float(np.mean(_changes(found, DEFAULT, part))))
    least = min(_DEFAULT_WITHOUT, key=lambda part: float(np.mean(_changes(found, DEFAULT, part))))
    joint = _changes(found, PAPER, JOINT)
    parts = ", ".join(f"{part} {mean(PAPER, part)}" for part in _PAPER_WITHOUT[:-1])
    own = ", ".join(f"{part} {mean(DEFAULT, part)}" for part in _DEFAULT_WITHOUT)
    return (
        "Taking predictor, scaler and placer away together changes the printed policy's mean "
        f"layer time by {min(joint):+.1%} to {max(joint):+.1%} by workload. What is left has one "
        f"replica per expert in its own place, within {max(apart):.2%} of static parallelism, so "
        "this ablation shows what the policy is worth against static once more and not what each "
        f"part gives. One by one, on average over workloads: {parts}. The default with {worst} "
        f"loses most, with {least} least ({own})."
    )


EXPERIMENT = Experiment(
    id="fig17",
    title="Ablation: predictor, scaler, placer and splitter",
    claim=(
        "Predictor, scaler and placer are all essential: without them (EPLB's history, no "
        "scaling, no placement) layer time increases."
    ),
    run=run,
)
