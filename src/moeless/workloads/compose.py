"""Engine steps composed of recorded requests and an arrival trace.

A trace of requests says where each prompt's tokens went; an arrival trace says when requests
came. Together they give the steps of an engine that never was: prefill steps made of real counts,
decode steps drawn from each request's own expert frequencies. Knows no policy.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import ConfigError, TraceError
from moeless.workloads.arrivals import Arrivals
from moeless.workloads.decode_schedule import DecodeSchedule
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta
from moeless.workloads.seeding import seeded_generator

DECODE_STEP_S: Final = 0.05
"""Time per output token of the composed decode steps."""

MAX_DECODE_STEPS: Final = 4096

_MIN_STEP_S: Final = 1e-6

_BLOCK_BYTES: Final = 32 * 2**20
"""Scratch memory per step, whatever the batch."""

_MAX_TRACE_BYTES: Final = 16 * 2**30


def compose_prefill(trace: RoutingTrace, arrivals: Arrivals, *, seed: int) -> RoutingTrace:
    """Batch the requests that arrive within one second into one prefill step.

    Each arrival is one recorded request, drawn uniformly with replacement; its prompt length is
    the recorded one, not the arrival trace's. A second without arrivals gives no step.

    Args:
        trace: A trace of requests.
        arrivals: When requests came.
        seed: Of the drawing (numpy's PCG64).

    Returns:
        A trace of steps; ``time_s`` is the second, counted from the first arrival. Predicted
        loads, where recorded, add up as the loads do.

    Raises:
        TraceError: The trace is not one of requests, or a second has more than 2^31 tokens.
    """
    _require_requests(trace)
    chosen_R = _draw_requests(trace, arrivals, seeded_generator(seed))
    second_R = np.floor(arrivals.time_s_R).astype(np.int64)
    second_S, first_S = np.unique(second_R, return_index=True)
    bounds = [*first_S.tolist(), len(arrivals)]
    shape = (len(second_S), *trace.loads_NLE.shape[1:])
    _require_room(shape)
    loads_SLE = np.zeros(shape, dtype=np.uint32)
    tokens_S = np.zeros(len(second_S), dtype=np.int64)
    predicted_SLE = None if trace.predicted_NLE is None else np.zeros(shape, dtype=np.float32)
    for step in range(len(second_S)):
        batch = chosen_R[bounds[step] : bounds[step + 1]]
        tokens_S[step] = trace.tokens_N[batch].sum(dtype=np.int64)
        for part in _blocks(batch, trace):
            loads_SLE[step] += trace.loads_NLE[part].sum(axis=0, dtype=np.uint32)
            if predicted_SLE is not None and trace.predicted_NLE is not None:
                predicted_SLE[step] += trace.predicted_NLE[part].sum(axis=0)
    return RoutingTrace(
        meta=_describe(
            trace.meta,
            phase=trace.meta.phase,
            how=f"one-second prefill batches, requests drawn with seed {seed}",
            keep_predictor=True,
        ),
        loads_NLE=loads_SLE,
        tokens_N=_as_tokens(tokens_S),
        time_s_N=second_S.astype(np.float64),
        decode_tokens_N=np.zeros(len(second_S), dtype=np.int32),
        predicted_NLE=predicted_SLE,
    )


def compose_decode(
    trace: RoutingTrace,
    arrivals: Arrivals,
    *,
    seed: int,
    step_s: float = DECODE_STEP_S,
    max_steps: int = MAX_DECODE_STEPS,
) -> RoutingTrace:
    """Draw decode steps: one token of every request that is being answered.

    The arrivals are the recorded requests that :func:`compose_prefill` draws with the same seed.
    A request decodes one token per step, from the first step that begins at or after its
    arrival, until it has the arrival trace's number of generated tokens. Time is a grid of
    ``step_s``; a step without requests is left out.

    **Sampling.** In each layer a token goes to K different experts, drawn so that expert e is
    among them with probability loads[e] / tokens of its request: exactly the request's own
    frequencies. This is systematic sampling: the frequencies, which sum to K, are laid end to end
    in an order shuffled for each step, and the experts at u, u + 1, ... u + K - 1 are taken, u
    uniform in [0, 1). Tokens and layers are independent given the request: correlation between
    consecutive tokens of an answer is not modelled, which is one reason why the result is called
    synthetic.

    Args:
        trace: A trace of requests.
        arrivals: When requests came, and how many tokens each generates.
        seed: Of all drawing (numpy's PCG64).
        step_s: Length of a step in seconds: the time per output token.
        max_steps: Stop after this many steps; ``meta.extra`` says whether that cut the trace.

    Returns:
        A trace of steps.

    Raises:
        TraceError: The trace is not one of requests, a drawn request has no tokens, or no
            arrival generates any.
        ConfigError: ``step_s`` is below a microsecond, or ``max_steps`` below 1.
    """
    _require_requests(trace)
    if not (math.isfinite(step_s) and step_s >= _MIN_STEP_S):
        raise ConfigError(f"step_s is {step_s}; a decode step takes at least {_MIN_STEP_S} s")
    if max_steps < 1:
        raise ConfigError(f"max_steps is {max_steps}; use at least 1")
    rng = seeded_generator(seed)
    chosen_R = _draw_requests(trace, arrivals, rng)
    schedule = DecodeSchedule(
        begin_R=np.ceil(arrivals.time_s_R / step_s).astype(np.int64),
        length_R=arrivals.generated_tokens_R,
    )
    slot_S, whole = schedule.busy_slots(max_steps)
    if len(slot_S) == 0:
        raise TraceError("no request of the arrival trace generates a token; nothing decodes")
    shape = (len(slot_S), *trace.loads_NLE.shape[1:])
    _require_room(shape)
    loads_SLE = np.zeros(shape, dtype=np.uint32)
    tokens_S = np.zeros(len(slot_S), dtype=np.int64)
    for step, active in enumerate(schedule.active(slot_S)):
        requests = chosen_R[active]
        _require_tokens(trace, requests)
        order_E = rng.permutation(trace.meta.num_experts)
        tokens_S[step] = len(requests)
        for part in _blocks(requests, trace):
            loads_SLE[step] += _draw_tokens(trace, part, order_E, rng)
    return RoutingTrace(
        meta=_describe(
            trace.meta,
            phase="decode (synthetic)",
            how=f"decode steps of {step_s} s drawn from each request's frequencies, seed {seed}",
            keep_predictor=False,
            decode={"step_s": step_s, "max_steps": max_steps, "whole": whole},
        ),
        loads_NLE=loads_SLE,
        tokens_N=_as_tokens(tokens_S),
        time_s_N=slot_S.astype(np.float64) * step_s,
        decode_tokens_N=_as_tokens(tokens_S),
    )


def _draw_tokens(
    trace: RoutingTrace,
    requests: NDArray[np.int64],
    order_E: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.uint32]:
    """One token of each request: how many go to each expert, [L, E]."""
    loads_BLE = trace.loads_NLE[requests][:, :, order_E].astype(np.int64)
    tokens_B = trace.tokens_N[requests].astype(np.int64)[:, None]
    start_BL = rng.integers(0, tokens_B, size=loads_BLE.shape[:2])
    # In integers, where a frequency of 1 is exactly one point per token.
    passed_BLE = (np.cumsum(loads_BLE, axis=2) + start_BL[:, :, None]) // tokens_B[:, :, None]
    taken_BLE = np.diff(passed_BLE, axis=2, prepend=0)
    taken_LE = np.empty(loads_BLE.shape[1:], dtype=np.uint32)
    taken_LE[:, order_E] = taken_BLE.sum(axis=0)
    return taken_LE


def _draw_requests(
    trace: RoutingTrace, arrivals: Arrivals, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The recorded request behind each arrival [R]; the first that a seed is used for."""
    return rng.integers(0, len(trace), size=len(arrivals))


def _blocks(requests: NDArray[np.int64], trace: RoutingTrace) -> list[NDArray[np.int64]]:
    size = max(1, _BLOCK_BYTES // (trace.loads_NLE[:1].size * 8))
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _require_requests(trace: RoutingTrace) -> None:
    if trace.meta.unit != "requests":
        raise TraceError(
            "meta.unit is 'steps': such a trace is replayed as it is; leave the arrivals out, or "
            "use a trace of requests"
        )


def _require_room(shape: tuple[int, ...]) -> None:
    num_bytes = math.prod(shape) * 4
    if num_bytes > _MAX_TRACE_BYTES:
        raise TraceError(
            f"the arrivals give {shape[0]} steps, {num_bytes} bytes of loads; cut the arrival "
            f"trace to stay below {_MAX_TRACE_BYTES // 2**30} GiB"
        )


def _require_tokens(trace: RoutingTrace, requests: NDArray[np.int64]) -> None:
    empty = trace.tokens_N[requests] == 0
    if empty.any():
        n = int(requests[int(np.argmax(empty))])
        raise TraceError(
            f"tokens[{n}] is 0: a request without tokens has no frequencies to decode from; drop "
            f"it from the trace"
        )


def _as_tokens(tokens_S: NDArray[np.int64]) -> NDArray[np.int32]:
    if int(tokens_S.max()) > np.iinfo(np.int32).max:
        step = int(np.argmax(tokens_S))
        raise TraceError(f"step {step} has {tokens_S[step]} tokens, more than int32 holds")
    return tokens_S.astype(np.int32)


def _describe(
    meta: TraceMeta, *, phase: str, how: str, keep_predictor: bool, **extra: object
) -> TraceMeta:
    return TraceMeta(
        model=meta.model,
        num_layers=meta.num_layers,
        num_experts=meta.num_experts,
        top_k=meta.top_k,
        layer_ids=meta.layer_ids,
        unit="steps",
        phase=phase,
        source=f"{meta.source}; composed: {how}",
        licence=meta.licence,
        predictor=meta.predictor if keep_predictor else None,
        extra={**meta.extra, **extra},
    )
