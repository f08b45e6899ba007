"""A time model of experts that ran: what the simulator is given, and judged by."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray
from moeless.costs.fitting import KernelFit, fit_kernels
from moeless_experiments.measured.layer_shape import LAYERS, LayerShape
from moeless_experiments.measured.workers import Sample
from moeless_experiments.measured.workload import IdArray

FloatArray = NDArray[np.float64]

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SKEWS: Final = (0.3, 1.0, 3.0)

_LEAST_TOKEN_S: Final = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Layer-steps that were run, N of them, repetitions merged.

    Args:
        batch_N: Tokens of the batch.
        seconds_N: Time of the layer.
        busy_ND: Time that each device computed.
        tokens_ND: Tokens of each device.
        touched_ND: Experts of each device that had tokens.
    """

    batch_N: CountArray
    seconds_N: FloatArray
    busy_ND: FloatArray
    tokens_ND: CountArray
    touched_ND: CountArray


def draw_steps(
    batches: Sequence[int], experts: int, top_k: int, *, skew: float, drift: float, seed: int
) -> Iterator[IdArray]:
    """Chosen experts of made-up steps, int64 [L, T, K] for each batch size given.

    Args:
        batches: Tokens of each step.
        experts: E.
        top_k: K.
        skew: How unequal experts are; 0.3 little, 3 much.
        drift: How fast that changes.
        seed: Of the drawing.
    """
    rng = np.random.default_rng(seed)
    weight_LE = rng.gamma(1 / skew, size=(LAYERS, experts)) + 1e-3
    for tokens in batches:
        weight_LE = weight_LE * np.exp(drift * rng.standard_normal(weight_LE.shape))
        score = np.log(weight_LE)[:, None] + rng.gumbel(size=(LAYERS, tokens, experts))
        yield np.argsort(-score, axis=2)[:, :, :top_k]


def calibration_steps(shape: LayerShape, repeats: int) -> list[IdArray]:
    """Steps of every size and skew, which are no workload's.

    Sizes come in random order, so that each finds caches as others leave them.

    Args:
        shape: Of the layers.
        repeats: Steps of each size and skew.
    """
    return [
        step
        for seed, skew in enumerate(SKEWS)
        for step in draw_steps(
            np.random.default_rng(seed).permutation(BATCHES * repeats).tolist(),
            shape.experts,
            shape.top_k,
            skew=skew,
            drift=0.5,
            seed=seed,
        )
    ]


def summarise(steps: Sequence[IdArray], samples: Sequence[Sequence[Sample]]) -> Measured:
    """The lower quartile of each layer-step's samples, by time: others only ever add time.

    Args:
        steps: What was run.
        samples: All runs of each layer-step, step by step and layer by layer.
    """
    chosen = [sorted(some, key=lambda one: one.seconds)[len(some) // 4] for some in samples]
    return Measured(
        batch_N=np.repeat([step.shape[1] for step in steps], LAYERS),
        seconds_N=np.array([one.seconds for one in chosen]),
        busy_ND=np.array([one.busy_s_D for one in chosen]),
        tokens_ND=np.array([one.share_ED.sum(axis=0) for one in chosen]),
        touched_ND=np.array([np.count_nonzero(one.share_ED, axis=0) for one in chosen]),
    )


def slowest_device(
    measured: Measured, base_s: float, touch_s: float, token_s: float
) -> tuple[FloatArray, FloatArray]:
    """Tokens and touched experts of the device that takes longest by these coefficients [N]."""
    tokens_ND, touched_ND = measured.tokens_ND, measured.touched_ND
    seconds_ND = np.where(tokens_ND > 0, base_s + touch_s * touched_ND + token_s * tokens_ND, 0)
    rows_N, device_N = np.arange(len(seconds_ND)), seconds_ND.argmax(axis=1)
    return (
        tokens_ND[rows_N, device_N].astype(np.float64),
        touched_ND[rows_N, device_N].astype(np.float64),
    )


def fit_transfer(measured: Measured) -> float:
    """Seconds per token, one way, that a layer takes beyond its slowest device's computing."""
    most_N = measured.tokens_ND.max(axis=1).astype(np.float64)
    beyond_N = measured.seconds_N - measured.busy_ND.max(axis=1)
    return fit_kernels(most_N, np.zeros_like(most_N), beyond_N).token_s / 2


def fit_linear(measured: Measured) -> LayerCost:
    """The linear model of a layer's time."""
    transfer_s = fit_transfer(measured)
    most_N = measured.tokens_ND.max(axis=1)
    device_s_N = measured.seconds_N - 2 * transfer_s * most_N
    coefficients = (0.0, 1.0, 1.0)
    for _ in range(20):  # which device is the slowest depends on the coefficients
        tokens_N, touched_N = slowest_device(measured, *coefficients)
        fit = fit_kernels(tokens_N, touched_N, device_s_N)
        coefficients = (fit.base_s, fit.touch_s, fit.token_s)
    return as_cost(fit, transfer_s=transfer_s)


def fit_devices(measured: Sequence[Measured]) -> LayerCost:
    """The linear model of each device's computing alone, which nothing is waited for.

    Args:
        measured: Runs, of different numbers of devices if need be.
    """
    used = [each.tokens_ND > 0 for each in measured]
    tokens_N, touched_N, busy_s_N = (
        np.concatenate(
            [getattr(m, name)[u].astype(np.float64) for m, u in zip(measured, used, strict=True)]
        )
        for name in ("tokens_ND", "touched_ND", "busy_ND")
    )
    return as_cost(fit_kernels(tokens_N, touched_N, busy_s_N))


def as_cost(fit: KernelFit, *, transfer_s: float = 0.0) -> LayerCost:
    """The linear model of a fit, also where noise or tiny experts leave nothing for tokens.

    Args:
        fit: Coefficients.
        transfer_s: Seconds per token, one way.
    """
    return LayerCost(
        base_s=fit.base_s,
        touch_s=fit.touch_s,
        token_s=max(fit.token_s, _LEAST_TOKEN_S),
        transfer_s=transfer_s,
    )


def write_linear(cost: LayerCost, file: Path, label: str) -> None:
    """Write a linear model of equal devices where replays and servers can read it.

    Args:
        cost: The model.
        file: Where to.
        label: Where it comes from, for reports.
    """
    names = ("base_s", "touch_s", "token_s", "transfer_s")
    content = {"label": label} | {name: getattr(cost, name) for name in names}
    file.write_text(json.dumps(content, indent=1), "utf8")
