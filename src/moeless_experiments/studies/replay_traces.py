"""The routing that replays use: recorded where there is a recording, else synthetic and so named.

Must not know policies.
"""

import importlib.util
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeless.costs.models import ModelShape, known_model
from moeless.errors import ConfigError
from moeless.workloads.arrivals import Arrivals, read_arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.load_sampling import sample_loads
from moeless.workloads.routing_trace import RoutingTrace, read_trace, write_trace
from moeless.workloads.seeding import seeded_generator
from moeless.workloads.synthetic import TraceSize, power_law
from moeless_experiments.context import Context
from moeless_experiments.recordings import available_prompts
from moeless_experiments.studies.forecast_traces import Forecast, make_trace, make_traces
from moeless_experiments.studies.predictor_bench import SMALL_BATCHES
from moeless_experiments.studies.predictor_kinds import FINETUNE_80

PEAK_S: Final = 600
"""The busiest ten minutes, as the paper replays peak traffic."""

ROUTING_FILE: Final = "routing/mixtral-8x7b_mmlu_requests.npz"
MIXTRAL, PHI, SCOUT = "mixtral-8x7b", "phi-3.5-moe", "llama-4-scout"

_QUICK_STEPS, _DECODE_STEPS = 100, 600
_DECODE_STEP_S: Final = 0.0625
"""A binary fraction, so that every group of requests begins exactly on a step."""

_STAY = 32
"""Steps that a request stays in a batch of fixed size."""

SPARSE: Final = "sparse conversation"
_THINNING = 50
"""Of the conversation trace every fiftieth request: one in nine seconds, with pauses."""

_ARRIVALS: Final = {
    "conversation": "arrivals/AzureLLMInferenceTrace_conv.csv",
    "code": "arrivals/AzureLLMInferenceTrace_code.csv",
}


FORECASTER: Final = FINETUNE_80
"""The paper's own predictor; makes the forecasts in the traces of demo models."""


class Workload(NamedTuple):
    """What is replayed.

    Args:
        model: Whose shape the experts have.
        exponent: Of power-law routing; None for what was recorded.
        arrivals: ``conversation`` or ``code`` of the Azure traces; for demo models the prompts.
        phase: ``prefill`` in batches of a second, or ``decode``.
        batch: Requests of each batch in place of those that arrive; None for the arrivals.
        ahead: Layers that forecasts of demo models were made ahead.
    """

    model: str
    exponent: float | None = None
    arrivals: str = "conversation"
    phase: Literal["prefill", "decode"] = "prefill"
    batch: int | None = None
    ahead: int = 1

    @property
    def label(self) -> str:
        """For tables and plots; says whether routing is real."""
        routing = "recorded" if self.exponent is None else f"synthetic power law {self.exponent:g}"
        how = self.arrivals if self.batch is None else f"batches of {self.batch}"
        phase = "" if self.phase == "prefill" else ", decode"
        return f"{self.model}, {routing}, {how}{phase}"


MIXTRAL_RECORDED: Final = Workload(MIXTRAL)
SYNTHETIC: Final = tuple(
    Workload(model, exponent) for model in (PHI, SCOUT) for exponent in (1.01, 1.2)
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyTrace:
    """A trace of steps, and what was seen before it.

    Args:
        path: The trace.
        trace: The same, read.
        history_LE: Loads of the ten minutes before, for those who plan from history [L, E].
    """

    path: Path
    trace: RoutingTrace
    history_LE: NDArray[np.float64]


def demo_workloads(context: Context, prompts: str) -> tuple[Workload, ...]:
    """Recorded routing of the demo models, if the prompts are there to record it with."""
    try:
        there = prompts in available_prompts(context)
    except ConfigError:
        return ()
    if not there or importlib.util.find_spec("torch") is None:
        return ()
    models = ("demo16",) if context.quick else ("demo8k2", "demo16", "demo32")
    return tuple(Workload(model, arrivals=prompts) for model in models)


def fitted_to(context: Context, workload: Workload) -> str:
    """Prompts that a demo model's forecaster is fitted to: others than are replayed, if it can."""
    own = workload.arrivals
    return next((each for each in available_prompts(context) if each != own), own)


def open_trace(context: Context, workload: Workload) -> StudyTrace:
    """A workload's steps, made once in a run.

    Raises:
        MoelessError: Data is missing or damaged.
    """
    return context.share(_key(workload), lambda: _make(context, workload))


def prepare_traces(context: Context, workloads: Iterable[Workload]) -> None:
    """Make what takes long of traces that are opened next: forecasts of demo models.

    Raises:
        MoelessError: Data is missing or damaged.
    """
    wanted = dict.fromkeys(load for load in workloads if load.model.startswith("demo"))
    make_traces(
        context,
        [_forecast(context, load) for load in wanted if not context.has(_key(load))],
    )


def steps_of(context: Context, workload: Workload) -> int:
    """Steps that are replayed at the most."""
    if context.quick:
        return _QUICK_STEPS
    return PEAK_S if workload.phase == "prefill" else _DECODE_STEPS


def shape_of(workload: Workload) -> ModelShape:
    """The shape of a workload's model; for demo models see the trace."""
    shape = known_model(workload.model)
    assert shape is not None
    return shape


def read_requests(context: Context) -> RoutingTrace:
    """Mixtral's recorded requests."""
    return context.share(("requests",), lambda: read_trace(context.require_data(ROUTING_FILE)))


def read_azure(context: Context, name: str = "conversation") -> Arrivals:
    """An Azure arrival trace."""
    return context.share(
        ("arrivals", name), lambda: read_arrivals(context.require_data(_ARRIVALS[name]))
    )


def busiest_start_s(arrivals: Arrivals, span_s: float = PEAK_S) -> float:
    """The whole second at which the busiest span starts, by number of requests."""
    second_R = np.floor(arrivals.time_s_R)
    ends_R = np.searchsorted(second_R, second_R + span_s)
    return float(second_R[int(np.argmax(ends_R - np.arange(len(arrivals))))])


def _make(context: Context, workload: Workload) -> StudyTrace:
    context.progress(f"{workload.label}: routing", 0, 1)
    if workload.model.startswith("demo"):
        whole = _demo(context, workload)
        first = len(whole) // 4
    elif workload.exponent is not None:
        whole, first = _power_law(context, workload)
    else:
        whole, first = _recorded(context, workload)
    last = min(first + steps_of(context, workload), len(whole))
    trace = _cut(whole, first, last)
    history_LE = whole.loads_NLE[:first].sum(axis=0, dtype=np.int64).astype(np.float64)
    folder = context.share(
        ("study folder",), lambda: tempfile.TemporaryDirectory(prefix="moeless-study-")
    )
    name = workload.label.replace(", ", "_").replace(" ", "_")
    path = Path(folder.name) / f"{name}_{workload.ahead}.npz"
    write_trace(trace, path)
    return StudyTrace(path=path, trace=trace, history_LE=history_LE)


def _cut(trace: RoutingTrace, first: int, last: int) -> RoutingTrace:
    span = slice(first, last)
    assert trace.time_s_N is not None
    return replace(
        trace,
        loads_NLE=trace.loads_NLE[span],
        tokens_N=trace.tokens_N[span],
        time_s_N=trace.time_s_N[span] - trace.time_s_N[first],
        decode_tokens_N=None if trace.decode_tokens_N is None else trace.decode_tokens_N[span],
        predicted_NLE=None if trace.predicted_NLE is None else trace.predicted_NLE[span],
        group_N=None,
        topk_ids_TLK=None,
        topk_offsets=None,
    )


def _key(workload: Workload) -> tuple[str, Workload]:
    return ("study trace", workload)


def _forecast(context: Context, workload: Workload) -> Forecast:
    return Forecast(
        workload.model,
        fitted_to(context, workload),
        workload.arrivals,
        workload.ahead,
        FORECASTER,
        SMALL_BATCHES,
    )


def _demo(context: Context, workload: Workload) -> RoutingTrace:
    trace = read_trace(make_trace(context, _forecast(context, workload)))
    if trace.time_s_N is None:
        trace = replace(trace, time_s_N=np.arange(len(trace), dtype=np.float64))
    return trace


def _recorded(context: Context, workload: Workload) -> tuple[RoutingTrace, int]:
    requests, arrivals = read_requests(context), _arrivals_of(context, workload)
    if workload.phase == "decode":
        peak = _between(arrivals, busiest_start_s(arrivals), PEAK_S)
        steps = steps_of(context, workload)
        whole = compose_decode(requests, peak, seed=context.seed, max_steps=3 * steps)
        return whole, max(len(whole) - steps, 0)
    whole = compose_prefill(requests, arrivals, seed=context.seed)
    assert whole.time_s_N is not None
    return whole, _first_step(context, workload, arrivals, whole.time_s_N)


def _power_law(context: Context, workload: Workload) -> tuple[RoutingTrace, int]:
    """Tokens of each second from the arrivals; popularity by rank, each layer its own ranking."""
    shape, exponent = shape_of(workload), workload.exponent
    assert exponent is not None
    arrivals = _arrivals_of(context, workload)
    if workload.phase == "decode":
        tokens_N, time_s_N = _decode_tokens(context, workload, arrivals)
    elif workload.batch is not None:
        whole = compose_prefill(read_requests(context), arrivals, seed=context.seed)
        assert whole.time_s_N is not None
        tokens_N, time_s_N = whole.tokens_N.astype(np.int64), whole.time_s_N
    else:
        # Prompts have their own lengths here: nothing recorded has to fit them.
        second_R = np.floor(arrivals.time_s_R).astype(np.int64)
        seconds_N, place_R = np.unique(second_R, return_inverse=True)
        tokens_N = np.bincount(place_R, weights=arrivals.prompt_tokens_R).astype(np.int64)
        time_s_N = seconds_N.astype(np.float64)
    start = _first_step(context, workload, arrivals, time_s_N)
    begin = max(start - PEAK_S, 0)
    end = min(start + steps_of(context, workload), len(tokens_N))
    tokens_N, time_s_N = tokens_N[begin:end], time_s_N[begin:end]
    size = TraceSize(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        steps=1,
        tokens=0,
    )
    frame = power_law(size, context.seed, exponent=exponent)
    rng = seeded_generator(context.seed)
    weight_E = np.arange(1, shape.num_experts + 1, dtype=np.float64) ** -exponent
    popularity_LE = rng.permuted(np.tile(weight_E / weight_E.sum(), (shape.num_layers, 1)), axis=1)
    loads_NLE = np.stack([sample_loads(popularity_LE, int(n), shape.top_k, rng) for n in tokens_N])
    meta = replace(
        frame.meta,
        model=workload.model,
        source=f"synthetic power law {exponent:g}, seed {context.seed}",
    )
    trace = RoutingTrace(
        meta=meta,
        loads_NLE=loads_NLE,
        tokens_N=tokens_N.astype(np.int32),
        time_s_N=time_s_N - time_s_N[0],
    )
    return trace, start - begin


def _first_step(
    context: Context, workload: Workload, arrivals: Arrivals, time_s_N: NDArray[np.float64]
) -> int:
    """The busiest ten minutes begin here; where all are alike, the second half."""
    if workload.batch is not None or workload.phase == "decode":
        return min(steps_of(context, workload), len(time_s_N) // 2)
    if workload.arrivals == SPARSE:
        return len(time_s_N) // 10
    return int(np.searchsorted(time_s_N, busiest_start_s(arrivals)))


def _decode_tokens(
    context: Context, workload: Workload, arrivals: Arrivals
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    steps = 2 * steps_of(context, workload)
    if workload.batch is not None:
        tokens_N = np.full(steps, workload.batch, dtype=np.int64)
        return tokens_N, np.arange(steps, dtype=np.float64) * _DECODE_STEP_S
    peak = _between(arrivals, busiest_start_s(arrivals), PEAK_S)
    whole = compose_decode(read_requests(context), peak, seed=context.seed, max_steps=steps)
    assert whole.time_s_N is not None
    return whole.tokens_N.astype(np.int64), whole.time_s_N


def _arrivals_of(context: Context, workload: Workload) -> Arrivals:
    if workload.batch is None and workload.arrivals == SPARSE:
        return _thin(read_azure(context))
    if workload.batch is None:
        return read_azure(context, workload.arrivals)
    steps = steps_of(context, workload)
    if workload.phase == "prefill":
        time_s_R = np.repeat(np.arange(2.0 * steps), workload.batch)
        count_R = np.ones(len(time_s_R), dtype=np.int64)
    else:
        # Requests come and go one group after another, so that batches neither grow nor repeat.
        blocks = -(-2 * steps // _STAY)
        step_R = np.repeat(np.arange(blocks) * _STAY, workload.batch)
        time_s_R = step_R * _DECODE_STEP_S
        count_R = np.full(len(time_s_R), _STAY, dtype=np.int64)
    return Arrivals(time_s_R=time_s_R, prompt_tokens_R=count_R, generated_tokens_R=count_R)


def _thin(arrivals: Arrivals) -> Arrivals:
    return Arrivals(
        time_s_R=arrivals.time_s_R[::_THINNING],
        prompt_tokens_R=arrivals.prompt_tokens_R[::_THINNING],
        generated_tokens_R=arrivals.generated_tokens_R[::_THINNING],
    )


def _between(arrivals: Arrivals, start_s: float, span_s: float) -> Arrivals:
    inside_R = (arrivals.time_s_R >= start_s) & (arrivals.time_s_R < start_s + span_s)
    time_s_R = arrivals.time_s_R[inside_R]
    return Arrivals(
        time_s_R=time_s_R - time_s_R[0],
        prompt_tokens_R=arrivals.prompt_tokens_R[inside_R],
        generated_tokens_R=arrivals.generated_tokens_R[inside_R],
    )
