"""Table 2: memory of all predictors of a model, by method. Counted, not measured."""

from typing import Any, Final, NamedTuple

from moeless.costs.models import ModelShape, known_model
from moeless_experiments.context import Context
from moeless_experiments.demo_models import DEMO_MODELS
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import COLOURS

PAPER_MODELS: Final = ("mixtral-8x7b", "phi-3.5-moe", "llama-4-scout")
_DISTANCE: Final = 1
_BOUND: Final = 0.02
_FLOAT32_BYTES: Final = 4


class _Row(NamedTuple):
    model: str
    layers: int
    experts: int
    hidden: int
    method: str
    parameters_of_a_layer: int
    total_mib: float
    share_of_perceptrons: float


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    del context
    names = (*PAPER_MODELS, *(variant.name for variant in DEMO_MODELS.values()))
    rows = [row for name in names for row in _count(name)]
    ours = [row for row in rows if row.method == "re-fitted gate"]
    own = [row for row in ours if row.model in PAPER_MODELS]
    largest = max(own, key=lambda row: row.parameters_of_a_layer)
    worst = max(ours, key=lambda row: row.share_of_perceptrons)
    return Result(
        provenance="simulated",
        tables=(Table(name="memory", columns=_Row._fields, rows=tuple(rows)),),
        plots=(Plot(name="memory", draw=lambda f: _draw(f, rows), inches=(8, 4.5)),),
        findings=(
            Finding(
                what="memory of re-fitted gates ÷ that of perceptrons (ProMoE), at most",
                paper="less than 2%",
                ours=f"{max(row.share_of_perceptrons for row in own):.2%} (the paper's models), "
                f"{worst.share_of_perceptrons:.2%} (worst of all)",
                cases={row.model: f"{row.share_of_perceptrons:.2%}" for row in ours},
                verdict="holds"
                if all(row.share_of_perceptrons < _BOUND for row in own)
                else "in part",
            ),
            Finding(
                what="parameters of the largest predictor",
                paper="80K",
                ours=f"{largest.parameters_of_a_layer:,} ({largest.model}: {largest.hidden} x "
                f"{largest.experts} weights and a bias)",
                verdict="holds" if largest.parameters_of_a_layer < 85_000 else "does not hold",
            ),
            Finding(
                what="memory of all predictors of a model",
                ours="; ".join(f"{row.model} {row.total_mib:.1f} MiB" for row in own),
            ),
        ),
        interpretation=(
            "A predictor is a gate: hidden x experts weights, and a bias where it was re-fitted. "
            "A perceptron hidden -> 2 hidden -> experts has about 2 (hidden + experts) weights "
            "for each expert's hidden ones, so the ratio is experts ÷ (2 (hidden + experts)): "
            "below 2% while experts are fewer than 4% of the hidden size. "
            + _above(ours)
            + " Our copy of the paper has the bound but not the table's numbers. Counted from "
            "shapes in float32 for distance 1 (one layer less than the model has); bfloat16 "
            "halves both."
        ),
        config={"distance": _DISTANCE, "dtype": "float32"},
    )


def _above(ours: list[_Row]) -> str:
    """Who is not below the paper's bound."""
    above = [
        f"{row.model} ({row.experts} experts, hidden size {row.hidden}: "
        f"{row.share_of_perceptrons:.2%})"
        for row in ours
        if row.share_of_perceptrons >= _BOUND
    ]
    below = len(ours) - len(above)
    return f"That holds for {below} of {len(ours)} models" + (
        f", not for {', '.join(above)}." if above else "."
    )


def _count(name: str) -> list[_Row]:
    shape = known_model(name)
    assert shape is not None
    methods = _parameters(shape)
    large = methods["perceptrons (ProMoE)"]
    layers = shape.num_layers - _DISTANCE
    return [
        _Row(
            model=name,
            layers=shape.num_layers,
            experts=shape.num_experts,
            hidden=shape.expert.hidden,
            method=method,
            parameters_of_a_layer=count,
            total_mib=layers * count * _FLOAT32_BYTES / 2**20,
            share_of_perceptrons=count / large,
        )
        for method, count in methods.items()
    ]


def _parameters(shape: ModelShape) -> dict[str, int]:
    """Parameters of one layer's predictor by method."""
    hidden, experts = shape.expert.hidden, shape.num_experts
    wide = 2 * hidden
    return {
        "copied gate (Mixtral-offloading)": hidden * experts,
        "re-fitted gate": hidden * experts + experts,
        "perceptrons (ProMoE)": wide * hidden + wide + experts * wide + experts,
        "transition table": experts * experts,
    }


def _draw(figure: Any, rows: list[_Row]) -> None:
    axes = figure.subplots()
    methods = ("re-fitted gate", "perceptrons (ProMoE)")
    models = list(dict.fromkeys(row.model for row in rows))
    for offset, method, colour in zip(
        (-0.2, 0.2), methods, (COLOURS["ridge"], COLOURS["mlp"]), strict=True
    ):
        values = [row.total_mib for row in rows if row.method == method]
        bars = axes.bar(
            [place + offset for place in range(len(models))],
            values,
            0.4,
            color=colour,
            label=method,
        )
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize="small")
    axes.set(yscale="log", ylabel="MiB of all predictors, float32")
    axes.set_xticks(range(len(models)), models, rotation=20, ha="right", fontsize="small")
    axes.legend()


EXPERIMENT = Experiment(
    id="table2",
    title="Memory of all predictors of a model, by method",
    claim="MoEless' predictors take less than 2% of the memory of ProMoE's.",
    run=run,
)
