"""Fit the linear model to measured kernel times.

``seconds = base + touch x (experts touched) + token x (tokens) + row x (rows)``, with no negative
coefficient and the relative errors as small as possible in the least-squares sense: a kernel of
50 microseconds counts as much as one of 20 milliseconds.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.errors import ConfigError

FloatArray = NDArray[np.float64]

_SHORTEST_S = 1e-12
"""No kernel ends sooner; keeps the weights of the fit finite."""

_TIE = 1e-9
"""Residuals that differ by less, relatively, are equal: then fewer coefficients win."""


@dataclass(frozen=True, kw_only=True)
class KernelFit:
    """Coefficients of one expert shape on one device, in seconds.

    Args:
        base_s: The launch.
        touch_s: Reading one expert's weights.
        token_s: One token (one assignment).
        row_s: One row of the hidden states that were passed in, routed to this device or not;
            0 where only a device's own rows are passed in, as MoEless does.
    """

    base_s: float
    touch_s: float
    token_s: float
    row_s: float = 0.0

    def predict_s(
        self, tokens_N: FloatArray, touched_N: FloatArray, rows_N: FloatArray | None = None
    ) -> FloatArray:
        """Seconds [N] of each case.

        Args:
            tokens_N: Tokens [N].
            touched_N: Experts with tokens [N].
            rows_N: Rows passed in [N], where they cost anything.
        """
        rows_s = 0.0 if rows_N is None else self.row_s * rows_N
        return self.base_s + self.touch_s * touched_N + self.token_s * tokens_N + rows_s

    def layer_cost(self, *, transfer_s: float = 0.0) -> LayerCost:
        """The linear model that policies optimise.

        Raises:
            ConfigError: Time does not grow with tokens.
        """
        return LayerCost(
            base_s=self.base_s,
            touch_s=self.touch_s,
            token_s=self.token_s,
            transfer_s=transfer_s,
        )


def fit_kernels(
    tokens_N: FloatArray,
    touched_N: FloatArray,
    seconds_N: FloatArray,
    *,
    rows_N: FloatArray | None = None,
) -> KernelFit:
    """Fit the coefficients to measurements.

    Tokens and touched experts may be means over draws: the model is linear in them.

    Args:
        tokens_N: Tokens [N].
        touched_N: Experts with tokens [N].
        seconds_N: Measured seconds [N].
        rows_N: Rows passed in [N]; None fits no such coefficient.

    Raises:
        ConfigError: Fewer than two measurements, unequal lengths, a value that is not finite,
            or a time below a picosecond.
    """
    columns = [np.ones_like(seconds_N), touched_N, tokens_N]
    columns += [] if rows_N is None else [rows_N]
    if any(column.shape != seconds_N.shape for column in columns) or seconds_N.ndim != 1:
        raise ConfigError("kernel fit: tokens, touched, rows and seconds differ in length")
    if len(seconds_N) < 2:
        raise ConfigError(f"kernel fit: {len(seconds_N)} measurements; give at least 2")
    matrix = np.stack(columns, axis=1).astype(np.float64)
    if not (np.isfinite(matrix).all() and np.isfinite(seconds_N).all()):
        raise ConfigError("kernel fit: a measurement is not finite")
    if not (seconds_N >= _SHORTEST_S).all():
        raise ConfigError(
            f"kernel fit: a time is {seconds_N.min()} s; times are at least {_SHORTEST_S} s"
        )
    found = _least_squares(matrix / seconds_N[:, None], np.ones(len(seconds_N)))
    return KernelFit(
        base_s=float(found[0]),
        touch_s=float(found[1]),
        token_s=float(found[2]),
        row_s=0.0 if rows_N is None else float(found[3]),
    )


def _least_squares(matrix_NC: FloatArray, target_N: FloatArray) -> FloatArray:
    """The best coefficients [C] that are not negative.

    With at most four columns every choice of non-zero coefficients can be tried; the best one
    without a negative coefficient is the constrained optimum.
    """
    scale_C = np.maximum(np.abs(matrix_NC).max(axis=0), np.finfo(np.float64).tiny)
    scaled_NC = matrix_NC / scale_C
    columns = scaled_NC.shape[1]
    best_C = np.zeros(columns)
    best = float(target_N @ target_N)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = scaled_NC[:, chosen]
            solved = np.linalg.lstsq(part, target_N, rcond=None)[0]
            error = target_N - part @ solved
            residual = float(error @ error)
            if (solved >= 0).all() and residual < best - _TIE * len(target_N):
                best_C = np.zeros(columns)
                best_C[list(chosen)] = solved
                best = residual
    unscaled_C: FloatArray = best_C / scale_C
    return unscaled_C
