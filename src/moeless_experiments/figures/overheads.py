"""Overheads of predictors: time to fit them, memory to fit them, delay of a prediction.

Of the paper's last section; the share of warm starts is a matter of replays.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.costs.models import known_model
from moeless.learned.gate_predictor import Gate, GatePredictor
from moeless.learned.load_predictor import LoadPredictor
from moeless.learned.ridge import RidgeSums, corrected, prior_residual
from moeless.learned.trained_predictor import TrainedPredictor
from moeless.learned.training import Trainer
from moeless.learned.training_options import Method, TrainingOptions, estimate_memory
from moeless_experiments.context import Context
from moeless_experiments.figure import Cell, Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import shades
from moeless_experiments.recordings import available_prompts, open_recording, tokens_of
from moeless_experiments.studies.sweeps import verdict
from moeless_experiments.summary import span

_MODEL: Final = "demo16"
_PAPER_MODELS: Final = ("mixtral-8x7b", "phi-3.5-moe", "llama-4-scout")
_MANY_EXPERTS: Final = ("olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
_DEMO_SHAPES: Final = ("smollm2-135m-e16-k8-s896", "smollm2-135m-e32-k12-s768")
_TOKENS: Final = (16, 64, 256, 1024)
_LIMIT_TOKENS: Final = 256
_LIMIT_MS: Final = 0.2
_FIT_TOKENS, _CHUNK_TOKENS = 8192, 2048
_REPEATS, _CALLS = 15, 20


class _Fit(NamedTuple):
    model: str
    layers: int
    tokens: int
    threads: int
    seconds: float
    how: str


class _Delay(NamedTuple):
    model: str
    hidden: int
    experts: int
    tokens: int
    copied_ms: float
    refitted_ms: float
    with_probabilities_ms: float


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    names = (
        *_PAPER_MODELS[: 1 if context.quick else None],
        *(() if context.quick else _MANY_EXPERTS),
        *_DEMO_SHAPES,
    )
    with _threads(1):
        delays = [
            _measure_delay(context, name, tokens)
            for name in names
            for tokens in (_TOKENS if not context.quick else (_LIMIT_TOKENS,))
        ]
    with _threads(context.threads):
        fits = [_refit_demo(context)]
        if not context.quick:
            fits += [_refit_shape(context, name) for name in _PAPER_MODELS]
    memory = tuple(_memory_rows())
    at_limit = [each for each in delays if each.tokens == _LIMIT_TOKENS]
    return Result(
        provenance="measured",
        tables=(
            Table(name="fitting_times", columns=_Fit._fields, rows=tuple(fits)),
            Table(name="prediction_delays", columns=_Delay._fields, rows=tuple(delays)),
            Table(
                name="training_memory",
                columns=("model", "method", "layers_at_a_time", "mib"),
                rows=memory,
                provenance="simulated",
            ),
        ),
        plots=(Plot(name="delays", draw=lambda f: _draw(f, delays), inches=(7.5, 4.5)),),
        findings=(
            Finding(
                what="time to fit all predictors of a model",
                paper="within 5 minutes (GPU)",
                ours=f"{span((fit.seconds for fit in fits), '.0f')} s on {fits[0].threads} "
                "CPU cores",
                cases={
                    fit.model: f"{fit.seconds:.1f} s on {fit.threads} cores ({fit.how})"
                    for fit in fits
                },
                why="in closed form on CPU cores instead of by gradient on a GPU",
                verdict=verdict([fit.seconds < 300 for fit in fits]),
            ),
            Finding(
                what=f"time to predict a layer, {_LIMIT_TOKENS} tokens, one core",
                paper="below 0.2 ms",
                ours=f"{span((e.with_probabilities_ms for e in at_limit), '.2f')} ms",
                cases={
                    f"{each.model}, {each.hidden} x {each.experts}": f"{each.refitted_ms:.3f} ms, "
                    f"with probabilities {each.with_probabilities_ms:.3f} ms"
                    for each in at_limit
                },
                why=_why_late(at_limit),
                verdict=verdict([e.with_probabilities_ms < _LIMIT_MS for e in at_limit]),
            ),
            Finding(
                what="memory to fit, all layers that go into 2 GiB at a time",
                ours=f"{span((float(str(row[3])) for row in memory), '.0f')} MiB",
                cases={f"{row[0]}, {row[1]}": f"{row[3]} MiB" for row in memory},
            ),
        ),
        interpretation=_interpret(fits, delays),
        config={
            "fit_tokens": _FIT_TOKENS,
            "delays": f"processor time, best of {_REPEATS} runs of {_CALLS} predictions",
            "states": "bfloat16, random",
            "distance": 1,
        },
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refit_demo(context: Context) -> _Fit:
    """Re-fit every layer of the demo model from what was recorded, as the command does."""
    shards = open_recording(context, _MODEL, available_prompts(context)[0])
    options = TrainingOptions(all_layers=True, seed=context.seed, max_tokens=tokens_of(context))
    began_s = time.perf_counter()
    training = Trainer(shards, options).train(
        lambda stage, done, total: context.progress(f"{_MODEL}: {stage}", done, total)
    )
    took_s = time.perf_counter() - began_s
    return _Fit(
        model=shards.manifest.model,
        layers=len(training.layers),
        tokens=training.fit_tokens,
        threads=torch.get_num_threads(),
        seconds=took_s,
        how="all of it, reading and judging included",
    )


def _refit_shape(context: Context, name: str) -> _Fit:
    """Fit one layer of a model's true shape to random states; all others take as long."""
    shape = known_model(name)
    assert shape is not None
    hidden, layers = shape.expert.hidden, shape.num_layers - 1
    generator = torch.Generator().manual_seed(context.seed)
    gate = _draw_gate(hidden, shape.num_experts, shape.top_k, generator)
    context.progress(f"{name}: one layer", 0, 1)
    states_TH = torch.randn(_CHUNK_TOKENS, hidden, generator=generator).bfloat16()
    began_s = time.perf_counter()
    sums = RidgeSums(hidden, shape.num_experts)
    for _ in range(_FIT_TOKENS // _CHUNK_TOKENS):
        x_TH = states_TH.float()
        sums.add(x_TH, prior_residual(gate, gate, x_TH, x_TH.roll(1, 0)))
    for penalty in TrainingOptions().penalties:
        corrected(gate, sums.solve(penalty))
    took_s = time.perf_counter() - began_s
    return _Fit(
        model=name,
        layers=layers,
        tokens=_FIT_TOKENS,
        threads=torch.get_num_threads(),
        seconds=took_s * layers,
        how=f"one layer of random states, times {layers}",
    )


def _measure_delay(context: Context, name: str, tokens: int) -> _Delay:
    shape = known_model(name)
    assert shape is not None
    hidden, experts = shape.expert.hidden, shape.num_experts
    context.progress(f"{name}: prediction of {tokens} tokens", 0, 1)
    generator = torch.Generator().manual_seed(context.seed)
    gates = [_draw_gate(hidden, experts, shape.top_k, generator) for _ in range(2)]
    x_TH = torch.randn(tokens, hidden, generator=generator).bfloat16()
    spreads = ([0.0], [0.5])
    certain, likely = (
        TrainedPredictor(gates[1:], 1, hidden=hidden, spreads=spread) for spread in spreads
    )
    times = (_time_ms(each, x_TH) for each in (GatePredictor(gates, 1), certain, likely))
    return _Delay(name, hidden, experts, tokens, *times)


def _draw_gate(hidden: int, experts: int, top_k: int, generator: torch.Generator) -> Gate:
    weight = torch.randn(experts, hidden, generator=generator) / hidden**0.5
    return Gate(
        weight, torch.zeros(experts), RouterRule(kind="softmax_topk", path="gate", top_k=top_k)
    )


def _time_ms(predictor: LoadPredictor, x_TH: Tensor) -> float:
    def call() -> None:
        predictor.predict(0, x_TH)

    return 1e3 * _best_cpu_s(call)


def _best_cpu_s(call: Callable[[], None]) -> float:
    """Processor time, so that what else runs on the machine counts little."""
    for _ in range(_CALLS):
        call()
    best = float("inf")
    for _ in range(_REPEATS):
        began_s = time.process_time()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.process_time() - began_s) / _CALLS)
    return best


def _memory_rows() -> Iterator[tuple[Cell, ...]]:
    methods: tuple[Method, ...] = ("ridge", "finetune", "mlp")
    for name in (*_PAPER_MODELS, _DEMO_SHAPES[0]):
        shape = known_model(name)
        assert shape is not None
        for method in methods:
            needed = estimate_memory(
                TrainingOptions(method=method),
                layers=shape.num_layers - 1,
                hidden=shape.expert.hidden,
                experts=shape.num_experts,
                tokens=_FIT_TOKENS,
            )
            yield (name, method, needed.group, round(needed.total_bytes / 2**20))


def _why_late(delays: list[_Delay]) -> str:
    """Of those that take longer: how fast their matrix product is, beside that of the others."""
    late = [each for each in delays if each.with_probabilities_ms >= _LIMIT_MS]
    if not late:
        return ""
    listed = ", ".join(
        f"{each.model} {each.hidden * each.experts / 1e3:,.0f} thousand and {_speed(each):.0f}"
        for each in late
    )
    others = [_speed(each) for each in delays if each not in late]
    return (
        "it is one product of tokens x hidden x experts and the choice of the most likely; "
        f"weights, and billion multiplications a second: {listed}"
        + (f"; the others reach {span(others, '.0f')}" if others else "")
    )


def _speed(each: _Delay) -> float:
    """Billion multiplications per second of a prediction with certain choices."""
    return each.tokens * each.hidden * each.experts / (1e6 * each.refitted_ms)


def _interpret(fits: list[_Fit], delays: list[_Delay]) -> str:
    slow = [
        each
        for each in delays
        if each.tokens == _LIMIT_TOKENS and each.with_probabilities_ms > _LIMIT_MS
    ]
    late = (
        "whatever the shape"
        if not slow
        else "but not for "
        + ", ".join(f"{each.model} ({each.with_probabilities_ms:.3f} ms)" for each in slow)
    )
    return (
        f"The demo model's {fits[0].layers} layers are fitted in {fits[0].seconds:.1f} s on "
        f"{fits[0].threads} CPU cores. For models of true size the closed form is bound by X'X "
        "(tokens x hidden²) and four solutions (hidden³ / 3 each in float64). A prediction of "
        f"{_LIMIT_TOKENS} tokens on one core stays below the paper's 0.2 ms (of a GPU) {late}: "
        "it is one thin matrix product, in bfloat16 since the hidden states are. Which processor "
        "it was is in the manifest; without bfloat16 products float32 takes about three times as "
        "long."
    )


def _draw(figure: Any, delays: list[_Delay]) -> None:
    axes = figure.subplots()
    models = list(dict.fromkeys(each.model for each in delays))
    for colour, model in zip(shades(len(models)), models, strict=True):
        own = [each for each in delays if each.model == model]
        label = f"{model}: {own[0].hidden} x {own[0].experts}"
        tokens = [each.tokens for each in own]
        axes.plot(tokens, [e.refitted_ms for e in own], color=colour, marker=".", label=label)
        axes.plot(tokens, [e.with_probabilities_ms for e in own], color=colour, linestyle=":")
    axes.axhline(0.2, color="black", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms to predict a layer, one core")
    axes.set_title("solid: certain choices; dotted: probabilities; line: the paper's 0.2 ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


EXPERIMENT = Experiment(
    id="overheads",
    title="Time and memory to fit predictors, delay of a prediction",
    claim=(
        "The largest predictor has 80K parameters; all of them are fine-tuned within five minutes "
        "on one GPU; the prediction delay is below 0.2 ms per layer."
    ),
    run=run,
    alone=True,
)
