"""What a look-ahead predictor would have said, by kind: exact, noisy, or as recorded.

The kinds ``previous`` and ``ewma`` look back instead of ahead: they are predictors of the control
loop (``moeless.policies.predictors``).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import LoadArray
from moeless.errors import ConfigError, TraceError
from moeless.workloads.routing_trace import RoutingTrace

Kind = Literal["noisy", "exact", "recorded", "previous", "ewma"]

KINDS: tuple[str, ...] = get_args(Kind)
_LOOKS_BACK = ("previous", "ewma")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How loads are expected.

    Args:
        kind: ``noisy``, ``exact`` and ``recorded`` look ahead, ``previous`` and ``ewma`` back.
        sigma: Of ``noisy``, the standard deviation of the logarithm of the error.
        distance: d, the layers that are looked ahead; 0 for those that look back.
    """

    kind: Kind
    sigma: float = 0.0
    distance: int = 1

    @property
    def history(self) -> str:
        """The predictor of layers that are planned from history."""
        return self.kind if self.kind in _LOOKS_BACK else "previous"

    def __str__(self) -> str:
        return f"noisy:{self.sigma:g}" if self.kind == "noisy" else self.kind


def parse_prediction(text: str, *, distance: int | None, trace: RoutingTrace) -> Prediction:
    """Read ``--prediction`` and ``--distance``.

    Args:
        text: A kind, ``noisy`` with its sigma: ``noisy:0.12``.
        distance: Layers looked ahead; None for 1, or for what was recorded.
        trace: What is replayed.

    Raises:
        ConfigError: No such kind, a sigma that is not a number of at least 0, or a distance that
            no layer, or no recording, has.
        TraceError: ``recorded``, and nothing was.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS or (bool(rest) != (kind == "noisy")):
        known = ", ".join("noisy:SIGMA" if name == "noisy" else name for name in KINDS)
        raise ConfigError(f"prediction {text!r} is unknown; use one of {known}")
    if kind in _LOOKS_BACK:
        if distance is not None:
            raise ConfigError(f"--distance is for predictions that look ahead; {kind} looks back")
        return Prediction(kind=cast("Kind", kind), distance=0)
    if kind == "recorded":
        distance = _recorded_distance(trace, distance)
    distance = 1 if distance is None else distance
    if not distance >= 1:
        raise ConfigError(f"--distance is {distance}; use 1 or more layers")
    return Prediction(
        kind=cast("Kind", kind),
        sigma=_parse_sigma(rest) if kind == "noisy" else 0.0,
        distance=distance,
    )


def _parse_sigma(text: str) -> float:
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"prediction noisy:{text}: sigma is a number of at least 0, like 0.12")
    return sigma


def _recorded_distance(trace: RoutingTrace, distance: int | None) -> int:
    if trace.predicted_NLE is None or trace.meta.predictor is None:
        raise TraceError(
            "the trace has no predicted loads; use another --prediction, or record with a "
            "predictor"
        )
    recorded = int(trace.meta.predictor["distance"])
    if recorded == 0:
        raise TraceError(
            "the trace's predicted loads look back (distance 0); use --prediction previous or ewma"
        )
    if distance is not None and distance != recorded:
        raise ConfigError(f"--distance is {distance}, but the trace was recorded at {recorded}")
    return recorded


class LoadForecast(Protocol):
    """Expected loads of one step."""

    def expected_LE(self, step: int) -> LoadArray:
        """Expected tokens of every layer in a step, counted from 0; float64 [L, E]."""
        ...


class ExactForecast:
    """Knows what will come true.

    Args:
        loads_SLE: Loads of each step, any integers [S, L, E].
    """

    def __init__(self, loads_SLE: NDArray[Any]) -> None:
        self._loads_SLE = loads_SLE

    def expected_LE(self, step: int) -> LoadArray:
        """The loads themselves."""
        expected: LoadArray = self._loads_SLE[step].astype(np.float64)
        return expected


class NoisyForecast:
    """Knows what will come true but for noise: w x exp(sigma x z), rescaled to the sum of w.

    z is standard normal, drawn for each (step, layer, expert) from the seed alone: every policy
    sees the same errors, whatever else happens.

    Args:
        loads_SLE: Loads of each step, any integers [S, L, E].
        sigma: Size of the noise; 0.12 is an error of about 12%.
        seed: Of the noise.
    """

    def __init__(self, loads_SLE: NDArray[Any], *, sigma: float, seed: int) -> None:
        self._loads_SLE = loads_SLE
        self._sigma = sigma
        self._seed = seed

    def expected_LE(self, step: int) -> LoadArray:
        """Noisy loads, each layer's sum as it will be."""
        rng = np.random.default_rng((self._seed, step))
        load_LE = self._loads_SLE[step].astype(np.float64)
        noisy_LE = load_LE * np.exp(self._sigma * rng.standard_normal(load_LE.shape))
        total_L1 = load_LE.sum(axis=1, keepdims=True)
        scale_L1 = total_L1 / np.where(total_L1 > 0, noisy_LE.sum(axis=1, keepdims=True), 1.0)
        expected: LoadArray = noisy_LE * scale_L1
        return expected


class RecordedForecast:
    """Says what a predictor said when the trace was recorded.

    Args:
        predicted_SLE: Expected loads of each step, float32 [S, L, E].
    """

    def __init__(self, predicted_SLE: NDArray[np.float32]) -> None:
        self._predicted_SLE = predicted_SLE

    def expected_LE(self, step: int) -> LoadArray:
        """The recorded expectation."""
        expected: LoadArray = self._predicted_SLE[step].astype(np.float64)
        return expected


def build_forecast(
    prediction: Prediction, trace: RoutingTrace, *, seed: int
) -> LoadForecast | None:
    """The forecast of a kind; None for kinds that look back."""
    if prediction.kind in _LOOKS_BACK:
        return None
    if prediction.kind == "recorded":
        assert trace.predicted_NLE is not None
        return RecordedForecast(trace.predicted_NLE)
    if prediction.kind == "exact":
        return ExactForecast(trace.loads_NLE)
    return NoisyForecast(trace.loads_NLE, sigma=prediction.sigma, seed=seed)
