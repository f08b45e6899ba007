"""Recorded routing as the chosen experts of every token, so that workers can be given it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.workloads.arrivals import Arrivals, read_arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta, read_trace
from moeless_experiments.context import Context
from moeless_experiments.measured.layer_shape import DEMO, LAYERS, MIXTRAL, LayerShape
from moeless_experiments.recordings import available_prompts, open_recording

IdArray = NDArray[np.int64]
"""Chosen experts of one step, [L, T, K]."""

STEP_S: Final = 0.05
"""Time between steps where a trace of them is simulated."""

_ROUTING: Final = "routing/mixtral-8x7b_mmlu_requests.npz"
_ARRIVALS: Final = "arrivals/AzureLLMInferenceTrace_conv.csv"
_PEAK_S: Final = 600.0
_PREFILL_TOKENS, _DECODE_TOKENS = 128, 16
_STRENGTH: Final = 1.2
"""Of the power law, the stronger one of those that are published for MoE models."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Steps of two layers of a model.

    Args:
        name: For reports.
        shape: Of the layers.
        ids: Chosen experts of each step, int64 [L, T, K].
        source: Where the routing comes from.
    """

    name: str
    shape: LayerShape
    ids: tuple[IdArray, ...]
    source: str

    def first(self, count: int) -> "Workload":
        """Only so many steps."""
        return replace(self, ids=self.ids[:count])

    def as_trace(self) -> RoutingTrace:
        """The same for the simulator."""
        experts = self.shape.experts
        loads_NLE = np.array(
            [[np.bincount(ids.ravel(), minlength=experts) for ids in step] for step in self.ids],
            dtype=np.uint32,
        )
        return RoutingTrace(
            meta=TraceMeta(
                model=self.shape.name,
                num_layers=LAYERS,
                num_experts=experts,
                top_k=self.shape.top_k,
                layer_ids=tuple(range(LAYERS)),
                unit="steps",
                phase="mixed",
                source=self.source,
                licence="as the source",
            ),
            loads_NLE=loads_NLE,
            tokens_N=np.array([step.shape[1] for step in self.ids], dtype=np.int32),
            time_s_N=np.arange(len(self.ids), dtype=np.float64) * STEP_S,
        )


def recorded_workloads(context: Context, steps: int) -> list[Workload]:
    """Workloads of so many steps.

    The demo model's routing, Mixtral's where the data is there, and one that is made up, for what
    more skew is worth.

    Args:
        context: Says where recordings and data are.
        steps: How many at most.

    Raises:
        MoelessError: Recordings or data are damaged, or cannot be made.
    """
    found = [*_demo_workloads(context, steps), _power_law(context, steps)]
    data = context.data
    if data is not None and all((data / name).exists() for name in (_ROUTING, _ARRIVALS)):
        found = _mixtral_workloads(context, steps) + found
    return [each for each in found if not context.quick or "decode" not in each.name]


def lay_out(count_E: CountArray, top_k: int) -> IdArray:
    """Chosen experts [T, K] of tokens whose counts are known: no token has an expert twice.

    Args:
        count_E: Tokens of each expert, none more than T; int64 [E].
        top_k: K; the counts add up to T x K.
    """
    experts_S = np.repeat(np.arange(len(count_E)), count_E)
    tokens = len(experts_S) // top_k
    # An expert's run is at most T long, and the assignments of a token are T apart.
    ids_TK: IdArray = np.ascontiguousarray(experts_S.reshape(top_k, tokens).T)
    return ids_TK


def scale(count_E: CountArray, total: int) -> CountArray:
    """Counts in the same proportion with another sum, by largest remainders.

    Args:
        count_E: Counts, int64 [E].
        total: The sum wanted.
    """
    exact_E = count_E * (total / count_E.sum())
    scaled_E: CountArray = np.floor(exact_E).astype(np.int64)
    order_E = np.argsort(scaled_E - exact_E, kind="stable")
    scaled_E[order_E[: total - int(scaled_E.sum())]] += 1
    return scaled_E


def busiest(arrivals: Arrivals, seconds: float) -> Arrivals:
    """The part of so many seconds in which most requests came."""
    time_s_R = arrivals.time_s_R
    until_R = np.searchsorted(time_s_R, time_s_R + seconds)
    first = int(np.argmax(until_R - np.arange(len(time_s_R))))
    chosen = slice(first, int(until_R[first]))
    return Arrivals(
        time_s_R=time_s_R[chosen] - time_s_R[first],
        prompt_tokens_R=arrivals.prompt_tokens_R[chosen],
        generated_tokens_R=arrivals.generated_tokens_R[chosen],
    )


def _mixtral_workloads(context: Context, steps: int) -> list[Workload]:
    trace = read_trace(context.require_data(_ROUTING))
    arrivals = busiest(read_arrivals(context.require_data(_ARRIVALS)), _PEAK_S)
    prefill = compose_prefill(trace, arrivals, seed=context.seed)
    decode = compose_decode(trace, arrivals, seed=context.seed)
    about = "recorded Mixtral-8x7B routing, busiest ten minutes of the Azure conversation trace"
    return [
        _from_loads("mixtral prefill", prefill, steps, about, tokens=_PREFILL_TOKENS),
        _from_loads("mixtral decode", decode, steps, about, tokens=None),
    ]


def _from_loads(
    name: str, trace: RoutingTrace, steps: int, about: str, *, tokens: int | None
) -> Workload:
    """Steps from the trace's middle on; with so many tokens each, or as many as there are."""
    layers = _inner_layers(trace.meta.num_layers)
    used = np.flatnonzero(trace.tokens_N > 0)
    first = max(0, (len(used) - steps) // 2)
    ids = []
    for step in used[first : first + steps]:
        counts_LE = trace.loads_NLE[step, layers].astype(np.int64)
        if tokens is not None:
            counts_LE = np.stack([scale(c, tokens * MIXTRAL.top_k) for c in counts_LE])
        ids.append(np.stack([lay_out(count_E, MIXTRAL.top_k) for count_E in counts_LE]))
    how = "" if tokens is None else f", loads of each second scaled to {tokens} tokens"
    return Workload(name=name, shape=MIXTRAL, ids=tuple(ids), source=f"{about}{how}")


def _power_law(context: Context, steps: int) -> Workload:
    """Experts whose popularity falls with their rank; ranks differ by layer and stay."""
    rng = np.random.default_rng(context.seed)
    log_E = -_STRENGTH * np.log(np.arange(1, MIXTRAL.experts + 1))
    log_LE = np.stack([rng.permutation(log_E) for _ in range(LAYERS)])
    ids = []
    for _ in range(steps):
        score = log_LE[:, None] + rng.gumbel(size=(LAYERS, _PREFILL_TOKENS, MIXTRAL.experts))
        ids.append(np.argsort(-score, axis=2)[:, :, : MIXTRAL.top_k])
    return Workload(
        name=f"power law {_STRENGTH}",
        shape=MIXTRAL,
        ids=tuple(ids),
        source=f"synthetic: popularity falls with rank to the power of {_STRENGTH}",
    )


def _demo_workloads(context: Context, steps: int) -> list[Workload]:
    prompts = available_prompts(context)[0]
    shards = open_recording(context, DEMO.name, prompts)
    layers = _inner_layers(shards.manifest.num_layers)
    chosen_TLK = np.concatenate(
        [shard.topk_ids[:, layers].numpy().astype(np.int64) for shard in shards]
    )
    decode_T = np.concatenate([shard.decode.numpy().astype(np.bool_) for shard in shards])
    about = f"recorded routing of the demo model on {prompts} prompts"
    return [
        _from_tokens("demo16 batches", chosen_TLK, _PREFILL_TOKENS, steps, about),
        _from_tokens("demo16 decode", chosen_TLK[decode_T], _DECODE_TOKENS, steps, about),
    ]


def _from_tokens(name: str, ids_TLK: IdArray, tokens: int, steps: int, about: str) -> Workload:
    count = min(steps, len(ids_TLK) // tokens)
    ids = tuple(
        np.ascontiguousarray(ids_TLK[n * tokens : (n + 1) * tokens].transpose(1, 0, 2))
        for n in range(count)
    )
    return Workload(name=name, shape=DEMO, ids=ids, source=f"{about}, {tokens} tokens a step")


def _inner_layers(count: int) -> Sequence[int]:
    """One layer after each third of the depth but the last."""
    return [count // 3, 2 * count // 3]
