"""Synthetic routing traces by name: shapes of load that real traces do not have, or not often.

Everything here is invented and labelled so (``licence`` and ``source`` say synthetic). Knows no
policy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import ConfigError
from moeless.workloads.load_sampling import apportion_around_hot, sample_loads
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta
from moeless.workloads.seeding import seeded_generator
from moeless.workloads.trace_meta import MAX_EXPERTS

STEP_S: Final = 0.1
"""Time from one synthetic step to the next."""

PopularityArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TraceSize:
    """How large a synthetic trace is.

    Args:
        num_layers: L.
        num_experts: E.
        top_k: K.
        steps: N.
        tokens: Tokens of a step; families whose steps differ say what it means to them.

    Raises:
        ConfigError: A number is out of range.
    """

    num_layers: int
    num_experts: int
    top_k: int
    steps: int
    tokens: int

    def __post_init__(self) -> None:
        limits = {
            "num_layers": (1, 10_000),
            "num_experts": (1, MAX_EXPERTS),
            "top_k": (1, self.num_experts),
            "steps": (1, 10**9),
            "tokens": (0, 2**26),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"synthetic trace: {name} is {getattr(self, name)}; use {least} to {most}"
                )


def uniform(size: TraceSize, seed: int) -> RoutingTrace:
    """Every expert is as likely as any other; what is left is chance."""
    rng = seeded_generator(seed)
    even_LE = np.full((size.num_layers, size.num_experts), 1 / size.num_experts)
    return _sampled("uniform", size, seed, _same_tokens(size), lambda _: even_LE, rng)


def power_law(size: TraceSize, seed: int, *, exponent: float = 1.2) -> RoutingTrace:
    """Popularity falls with rank to the power ``exponent``; each layer ranks its own way.

    Args:
        size: Of the trace.
        seed: Of the ranking and the sampling.
        exponent: 0 is uniform; 1.01 and 1.2 are the values published for kernel benchmarks.
    """
    rng = seeded_generator(seed)
    popularity_LE = _ranked_popularity(size, exponent, rng)
    return _sampled("power_law", size, seed, _same_tokens(size), lambda _: popularity_LE, rng)


def dirichlet_drift(
    size: TraceSize, seed: int, *, concentration: float = 1.0, drift: float = 0.02
) -> RoutingTrace:
    """Popularity wanders: each step mixes in a share ``drift`` of a new Dirichlet draw.

    Args:
        size: Of the trace.
        seed: Of popularity and sampling.
        concentration: Of the Dirichlet distribution; the smaller, the more skewed.
        drift: From 0, fixed, to 1, drawn afresh at each step.
    """
    if not 0.01 <= concentration <= 1e6:
        raise ConfigError(
            f"dirichlet_drift: concentration is {concentration}; use 0.01 to 1000000"
        )
    if not 0 <= drift <= 1:
        raise ConfigError(f"dirichlet_drift: drift is {drift}; use 0 to 1")
    rng = seeded_generator(seed)
    alpha_E = np.full(size.num_experts, concentration)
    state_LE = rng.dirichlet(alpha_E, size=size.num_layers)

    def popularity_LE(_step: int) -> PopularityArray:
        nonlocal state_LE
        state_LE = (1 - drift) * state_LE + drift * rng.dirichlet(alpha_E, size=size.num_layers)
        return state_LE

    return _sampled("dirichlet_drift", size, seed, _same_tokens(size), popularity_LE, rng)


def bursty(size: TraceSize, seed: int, *, burst: int = 16, start: float = 0.05) -> RoutingTrace:
    """Quiet steps of ``tokens``, and bursts of ``burst`` times as many with other hot experts.

    Args:
        size: Of the trace; ``tokens`` is that of a quiet step.
        seed: Of bursts, popularity and sampling.
        burst: How many times larger a burst's steps are.
        start: Probability that a quiet step is followed by a burst; one lasts four steps on
            average.
    """
    if not 1 <= burst <= 16 or not 0 <= start <= 1:
        raise ConfigError(f"bursty: burst is {burst}, start {start}; use 1 to 16, and 0 to 1")
    rng = seeded_generator(seed)
    bursting_N = np.zeros(size.steps, dtype=bool)
    for step, chance in enumerate(rng.random(size.steps)):
        was = bool(bursting_N[step - 1]) if step else False
        bursting_N[step] = chance < (0.75 if was else start)
    quiet_LE, burst_LE = (_ranked_popularity(size, 1.2, rng) for _ in range(2))
    tokens_N = np.where(bursting_N, size.tokens * burst, size.tokens)
    return _sampled(
        "bursty", size, seed, tokens_N, lambda n: burst_LE if bursting_N[n] else quiet_LE, rng
    )


def tiny_batches(size: TraceSize, seed: int) -> RoutingTrace:
    """Zero to four tokens a step (never more than ``tokens``): decoding for very few users."""
    rng = seeded_generator(seed)
    popularity_LE = _ranked_popularity(size, 1.2, rng)
    tokens_N = rng.integers(0, min(size.tokens, 4) + 1, size=size.steps)
    return _sampled("tiny_batches", size, seed, tokens_N, lambda _: popularity_LE, rng)


def one_hot(size: TraceSize, seed: int) -> RoutingTrace:
    """Every token goes to one expert per layer, always the same; its other choices are even."""
    hot_L = seeded_generator(seed).integers(0, size.num_experts, size=size.num_layers)
    hot_NL = np.broadcast_to(hot_L, (size.steps, size.num_layers))
    return _around_hot("one_hot", size, seed, hot_NL)


def alternating(size: TraceSize, seed: int) -> RoutingTrace:
    """As ``one_hot``, but the hot expert is another one at every step: history misleads."""
    shape = (size.steps, size.num_layers)
    # A jump of 1 to E - 1 never lands on the same expert; with one expert there is no other.
    jump_NL = seeded_generator(seed).integers(1, max(size.num_experts, 2), size=shape)
    hot_NL = np.cumsum(jump_NL, axis=0) % size.num_experts
    return _around_hot("alternating", size, seed, hot_NL)


FAMILIES: Final[Mapping[str, Callable[..., RoutingTrace]]] = MappingProxyType(
    {
        family.__name__: family
        for family in (
            uniform,
            power_law,
            dirichlet_drift,
            bursty,
            tiny_batches,
            one_hot,
            alternating,
        )
    }
)
"""Name to generator; each takes a ``TraceSize`` and a seed."""


def make_synthetic(
    name: str,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    steps: int,
    tokens: int,
    seed: int,
    model: str = "synthetic",
) -> RoutingTrace:
    """Make a synthetic trace of one family with its default options.

    Args:
        name: One of ``FAMILIES``.
        num_layers: L.
        num_experts: E.
        top_k: K.
        steps: N.
        tokens: Tokens of a step.
        seed: Equal seeds give equal traces.
        model: The model it stands in for, where its name should give the expert shape.

    Raises:
        ConfigError: The name is unknown, or a number is out of range.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"unknown synthetic trace {name!r}; known are: {', '.join(sorted(FAMILIES))}"
        )
    size = TraceSize(
        num_layers=num_layers, num_experts=num_experts, top_k=top_k, steps=steps, tokens=tokens
    )
    trace = family(size, seed)
    return replace(trace, meta=replace(trace.meta, model=model))


def _sampled(
    family: str,
    size: TraceSize,
    seed: int,
    tokens_N: NDArray[np.int64],
    popularity_LE: Callable[[int], PopularityArray],
    rng: np.random.Generator,
) -> RoutingTrace:
    loads_NLE = np.zeros((size.steps, size.num_layers, size.num_experts), dtype=np.uint32)
    for step, tokens in enumerate(tokens_N.tolist()):
        loads_NLE[step] = sample_loads(popularity_LE(step), tokens, size.top_k, rng)
    return _trace(family, size, seed, loads_NLE, tokens_N)


def _around_hot(
    family: str, size: TraceSize, seed: int, hot_NL: NDArray[np.int64]
) -> RoutingTrace:
    loads_NLE = apportion_around_hot(hot_NL, size.tokens, size.top_k, size.num_experts)
    return _trace(family, size, seed, loads_NLE, _same_tokens(size))


def _trace(
    family: str,
    size: TraceSize,
    seed: int,
    loads_NLE: NDArray[np.uint32],
    tokens_N: NDArray[np.int64],
) -> RoutingTrace:
    meta = TraceMeta(
        model="synthetic",
        num_layers=size.num_layers,
        num_experts=size.num_experts,
        top_k=size.top_k,
        layer_ids=tuple(range(size.num_layers)),
        unit="steps",
        phase="synthetic",
        source=f"synthetic {family}, seed {seed}",
        licence="synthetic",
    )
    return RoutingTrace(
        meta=meta,
        loads_NLE=loads_NLE,
        tokens_N=tokens_N.astype(np.int32),
        time_s_N=np.arange(size.steps, dtype=np.float64) * STEP_S,
    )


def _ranked_popularity(
    size: TraceSize, exponent: float, rng: np.random.Generator
) -> PopularityArray:
    if not 0 <= exponent <= 20:
        raise ConfigError(f"power law: exponent is {exponent}; use 0 to 20")
    weight_E = np.arange(1, size.num_experts + 1, dtype=np.float64) ** -exponent
    rows_LE = np.tile(weight_E / weight_E.sum(), (size.num_layers, 1))
    return rng.permuted(rows_LE, axis=1)


def _same_tokens(size: TraceSize) -> NDArray[np.int64]:
    return np.full(size.steps, size.tokens, dtype=np.int64)
