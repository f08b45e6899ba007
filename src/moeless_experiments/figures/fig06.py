"""Figure 6: how alike gate inputs are some layers apart, and how well copied gates look ahead."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moeless.bootstrap.predictors.predictor import profile
from moeless_experiments.context import Context, here
from moeless_experiments.demo_models import chosen_models
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table, Verdict
from moeless_experiments.plotting import grid, shades
from moeless_experiments.processes import Job
from moeless_experiments.recordings import (
    available_prompts,
    open_recording,
    record_all,
    tokens_of,
)

_DISTANCES = (1, 2, 3, 4, 5)
_SETTLED = 4
"""The first layers are unlike all others in any model."""

_COLUMNS = ("model", "prompts", "distance", "layer", "cosine", "load_accuracy", "token_recall")


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    reports, rows = _profile_all(context), []
    for (model, prompts), report in reports.items():
        for distance, found in report["distances"].items():
            for layer in range(int(distance), report["layers_in_model"]):
                figures = (
                    found[name][layer] for name in ("cosine", "load_accuracy", "token_recall")
                )
                rows.append((model, prompts, int(distance), layer, *figures))
    first: dict[str, dict[str, Any]] = {}
    for (model, _), report in reports.items():
        first.setdefault(model, report)
    return Result(
        provenance="measured",
        tables=(Table(name="layers", columns=_COLUMNS, rows=tuple(rows)),),
        plots=(
            Plot(name="similarity", draw=lambda f: _draw(f, first, "cosine"), inches=(9, 6)),
            Plot(name="accuracy", draw=lambda f: _draw(f, first, "load_accuracy"), inches=(9, 6)),
        ),
        findings=(
            _finding(reports, "cosine", "cosine of gate inputs, d = 1 to 4, mean over layers"),
            _finding(reports, "load_accuracy", "load accuracy of copied gates, d = 1 to 4"),
            _early_and_late(reports),
        ),
        interpretation=_interpret(reports),
        config={
            "distances": list(_DISTANCES),
            "tokens": tokens_of(context),
            "batch": next(iter(reports.values()))["batch"],
            "prompts": list(available_prompts(context)),
        },
    )


def _profile_all(context: Context) -> dict[tuple[str, str], dict[str, Any]]:
    pairs = [
        (model, prompts)
        for model in chosen_models(context)
        for prompts in available_prompts(context)
    ]
    record_all(context, pairs)
    jobs = [Job(", ".join(pair), (context.settled(), *pair)) for pair in pairs]
    return dict(zip(pairs, context.compute("gates", _profile, jobs), strict=True))


def _profile(job: tuple[Context, str, str]) -> dict[str, Any]:
    context, model, prompts = job
    shards = open_recording(here(context), model, prompts)
    return profile(shards, _DISTANCES, max_tokens=tokens_of(context))


def _means(reports: dict[Any, Any], name: str, distance: int) -> list[float]:
    return [report["distances"][str(distance)][f"mean_{name}"] for report in reports.values()]


def _finding(reports: dict[Any, Any], name: str, what: str) -> Finding:
    parts = []
    for distance in _DISTANCES[:4]:
        means = _means(reports, name, distance)
        parts.append(f"{min(means):.2f} to {max(means):.2f}")
    return Finding(what=f"{what}, over models and prompts", ours="; ".join(parts))


def _thirds(report: dict[str, Any], name: str) -> tuple[float, float]:
    values = np.array(report["distances"]["1"][name][1:], dtype=np.float64)
    part = len(values) // 3
    return float(values[:part].mean()), float(values[-part:].mean())


def _early_and_late(reports: dict[Any, Any]) -> Finding:
    parts, thirds = [], []
    for (model, prompts), report in reports.items():
        early, late = _thirds(report, "load_accuracy")
        thirds.append((early, late))
        parts.append(f"{model} {prompts} {early:.2f}, {late:.2f}")
    return Finding(
        what="load accuracy at d = 1, first and last third of the layers",
        paper="early layers lower, later ones more stable (no number in the text)",
        ours="; ".join(parts),
        verdict=_verdict([late - early for early, late in thirds]),
    )


def _verdict(gaps: Sequence[float]) -> Verdict:
    if all(gap > 0 for gap in gaps):
        return "holds"
    return "in part" if any(gap > 0 for gap in gaps) else "does not hold"


def _interpret(reports: dict[Any, Any]) -> str:
    gaps = []
    for report in reports.values():
        early, late = _thirds(report, "load_accuracy")
        gaps.append(late - early)
    cosine, accuracy = (
        {d: float(np.mean(_means(reports, name, d))) for d in (1, 5)}
        for name in ("cosine", "load_accuracy")
    )
    return (
        f"What enters a gate resembles what enters the next one (cosine {cosine[1]:.2f} on "
        f"average) and less so with distance ({cosine[5]:.2f} five layers on), as the paper "
        f"says; the load accuracy of copied gates goes from {accuracy[1]:.2f} to "
        f"{accuracy[5]:.2f}. The last third of the layers is more predictable than the first in "
        f"{sum(gap > 0 for gap in gaps)} of {len(gaps)} cases, by {np.mean(gaps):.3f} on average "
        f"at d = 1. Depth is not all that matters. {_break(reports)}"
    )


def _break(reports: dict[Any, Any]) -> str:
    """Where what enters gates changes the most beyond the first layers, and what that does."""
    found = []
    for report in reports.values():
        cosines = np.array(report["distances"]["1"]["cosine"], dtype=np.float64)
        layer = _SETTLED + int(np.nanargmin(cosines[_SETTLED:]))
        accuracy = report["distances"]["3"]["load_accuracy"]
        across = [value for value in accuracy[layer + 1 : layer + 3] if value is not None]
        if across:
            found.append((layer, float(cosines[layer]), float(np.mean(across))))
    if not found:
        return "This model has too few layers to look for abrupt changes."
    layers = sorted({layer for layer, _, _ in found})
    return (
        f"What enters gates changes most abruptly before layer {' or '.join(map(str, layers))} "
        f"(cosine {np.mean([cosine for _, cosine, _ in found]):.2f} with the layer before), and a "
        "copied gate that looks across it from three layers before is right for "
        f"{np.mean([across for _, _, across in found]):.2f} of the load only. (The demo models "
        "share that: they are carved from one dense model.)"
    )


def _draw(figure: Any, reports: dict[str, Any], name: str) -> None:
    for panel, (model, report) in zip(grid(figure, len(reports)), reports.items(), strict=True):
        for shade, distance in zip(shades(len(_DISTANCES)), _DISTANCES, strict=True):
            values = report["distances"][str(distance)][name]
            panel.plot(range(len(values)), _gaps(values), color=shade, label=f"d = {distance}")
        panel.set(title=f"{model} ({report['prompts']})", xlabel="MoE layer", ylim=(None, 1))
        panel.set_ylabel("cosine of gate inputs" if name == "cosine" else "load accuracy")
        panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _gaps(values: list[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


EXPERIMENT = Experiment(
    id="fig06",
    title="Similarity of gate inputs and accuracy of copied gates, by layer",
    claim=(
        "Inputs of gates d layers apart (d = 1 to 4) are consistently similar, so that a copied "
        "gate can look ahead; early layers are less similar and less predictable than later ones."
    ),
    run=run,
)
