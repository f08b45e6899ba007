"""Figure 3: request arrivals, token loads, and experts in use over time."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.studies.replay_traces import (
    MIXTRAL,
    PEAK_S,
    PHI,
    Workload,
    busiest_start_s,
    open_trace,
    read_azure,
    steps_of,
)

_TRACES: Final = ("conversation", "code")
_CHUNK_S: Final = 10


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    seconds = {name: _per_second(context, name) for name in _TRACES}
    active = {load: _active(context, load) for load in _loads()}
    rows = tuple(
        (name, second, int(requests), int(tokens))
        for name, (requests_S, tokens_S) in seconds.items()
        for second, (requests, tokens) in enumerate(zip(requests_S, tokens_S, strict=True))
    )
    used = tuple(
        (load.label, step, float(time_s), float(mean), int(least), int(most))
        for load, (time_s_N, count_NL) in active.items()
        for step, (time_s, mean, least, most) in enumerate(
            zip(
                time_s_N,
                count_NL.mean(axis=1),
                count_NL.min(axis=1),
                count_NL.max(axis=1),
                strict=True,
            )
        )
    )
    swing = {name: _swing(tokens_S) for name, (_, tokens_S) in seconds.items()}
    experts = {load: open_trace(context, load).trace.meta.num_experts for load in active}
    shares = {
        load: float((count_NL < experts[load]).mean()) for load, (_, count_NL) in active.items()
    }
    return Result(
        provenance="measured",
        tables=(
            Table(
                name="arrivals",
                columns=("arrivals", "second_of_the_peak", "requests", "prompt_tokens"),
                rows=rows,
            ),
            Table(
                name="active_experts",
                columns=(
                    "workload",
                    "step",
                    "time_s",
                    "active_experts_mean",
                    "active_experts_min",
                    "active_experts_max",
                ),
                rows=used,
            ),
        ),
        plots=(
            Plot(
                name="over_time",
                draw=lambda figure: _draw(figure, seconds, active),
                inches=(12, 3.6),
                caption="The busiest ten minutes of the Azure traces: requests of each second, "
                "their prompt tokens, and how many experts of a layer have any token.",
            ),
        ),
        findings=(
            Finding(
                what=f"prompt tokens of {_CHUNK_S} s within the busiest {PEAK_S} s, largest ÷ "
                "smallest",
                ours="; ".join(f"{name}: {_factor(*each)}" for name, each in swing.items()),
                verdict="holds"
                if all(high > 1.5 * low for low, high in swing.values())
                else "in part",
            ),
            Finding(
                what="layer-steps in which some expert has no token",
                ours="; ".join(f"{load.label}: {share:.1%}" for load, share in shares.items()),
            ),
        ),
        interpretation=(
            f"Within the busiest {PEAK_S // 60} minutes token loads of {_CHUNK_S} seconds vary: "
            "largest ÷ smallest is "
            + ", ".join(f"{_factor(*each)} ({name})" for name, each in swing.items())
            + ". Whether experts fall idle "
            "depends on the batch: in prefill batches of a second "
            + _join(shares, decode=False)
            + " of the layer-steps leave an expert without tokens, in decode steps "
            + _join(shares, decode=True)
            + ". Scaling single experts to zero therefore saves memory where batches are small, "
            "and hardly any where they are large. The paper shows this for Phi-3.5-MoE on "
            "LMSYS-Chat-1M; ours is recorded routing of Mixtral, and power-law routing for Phi, "
            "labelled synthetic. Our copy of the paper has no numbers of this figure."
        ),
        config={
            "span_s": PEAK_S,
            "workloads": [load.label for load in active],
            "steps": [steps_of(context, load) for load in active],
        },
    )


def _loads() -> tuple[Workload, ...]:
    return (
        Workload(MIXTRAL),
        Workload(PHI, 1.2),
        Workload(MIXTRAL, phase="decode"),
        Workload(MIXTRAL, phase="decode", batch=8),
    )


def _per_second(context: Context, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    arrivals = read_azure(context, name)
    second_R = np.floor(arrivals.time_s_R).astype(np.int64) - int(busiest_start_s(arrivals))
    inside_R = (second_R >= 0) & (second_R < PEAK_S)
    place_R = second_R[inside_R]
    requests_S = np.bincount(place_R, minlength=PEAK_S).astype(np.int64)
    tokens_S = np.bincount(
        place_R, weights=arrivals.prompt_tokens_R[inside_R], minlength=PEAK_S
    ).astype(np.int64)
    return requests_S, tokens_S


def _active(context: Context, load: Workload) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    trace = open_trace(context, load).trace
    assert trace.time_s_N is not None
    return trace.time_s_N, (trace.loads_NLE > 0).sum(axis=2)


def _swing(tokens_S: NDArray[np.int64]) -> tuple[int, int]:
    """Least and most tokens of a chunk of time."""
    chunks = tokens_S[: len(tokens_S) // _CHUNK_S * _CHUNK_S].reshape(-1, _CHUNK_S).sum(axis=1)
    return int(chunks.min()), int(chunks.max())


def _factor(low: int, high: int) -> str:
    return f"{high / low:.1f}" if low else f"unbounded, from silence to {high:,} tokens"


def _join(shares: dict[Workload, float], *, decode: bool) -> str:
    chosen = [share for load, share in shares.items() if (load.phase == "decode") == decode]
    low, high = f"{min(chosen):.1%}", f"{max(chosen):.1%}"
    return low if low == high else f"{low} to {high}"


def _draw(
    figure: Any,
    seconds: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]],
    active: dict[Workload, tuple[NDArray[np.float64], NDArray[np.int64]]],
) -> None:
    requests, tokens, experts = figure.subplots(1, 3)
    for name, (requests_S, tokens_S) in seconds.items():
        requests.plot(requests_S, linewidth=0.8, label=name)
        tokens.plot(tokens_S, linewidth=0.8, label=name)
    requests.set(title="requests", xlabel="second", ylabel="requests per second")
    tokens.set(title="tokens", xlabel="second", ylabel="prompt tokens per second")
    for load, (_, count_NL) in active.items():
        experts.plot(count_NL.mean(axis=1), linewidth=0.8, label=load.label)
    experts.set(title="active experts", xlabel="step", ylabel="mean over layers")
    for panel in (requests, experts):
        panel.legend(fontsize="x-small")


EXPERIMENT = Experiment(
    id="fig03",
    title="Requests, tokens and experts in use over time",
    claim="Varying arrivals and token loads make the demand for experts, and the number of active "
    "experts, fluctuate over time.",
    run=run,
)
