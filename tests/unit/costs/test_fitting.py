import numpy as np
import pytest

from moeless.costs.busiest_rank import draw_busiest_rank
from moeless.costs.fitting import fit_kernels
from moeless.errors import ConfigError

TOKENS = np.array([1.0, 10, 100, 1000, 5000, 20000])
TOUCHED = np.array([1.0, 4, 2, 8, 3, 8])
ROWS = np.array([7.0, 30, 900, 1000, 40000, 20000])


def test_the_fit_finds_the_coefficients_that_made_the_times():
    seconds = 5e-5 + 7e-5 * TOUCHED + 6e-7 * TOKENS + 3e-8 * ROWS
    fit = fit_kernels(TOKENS, TOUCHED, seconds, rows_N=ROWS)
    found = (fit.base_s, fit.touch_s, fit.token_s, fit.row_s)
    assert found == pytest.approx((5e-5, 7e-5, 6e-7, 3e-8))
    assert fit.predict_s(TOKENS, TOUCHED, ROWS) == pytest.approx(seconds)


def test_a_coefficient_that_would_be_negative_is_zero():
    seconds = 5e-5 - 4e-6 * TOUCHED + 6e-7 * TOKENS
    fit = fit_kernels(TOKENS, TOUCHED, seconds)
    assert fit.touch_s == 0.0
    assert fit.layer_cost(transfer_s=1e-9).token_s == pytest.approx(6e-7, rel=0.1)


def test_experts_that_were_never_varied_cost_nothing_of_their_own():
    fit = fit_kernels(TOKENS, np.ones(6), 5e-5 + 6e-7 * TOKENS)
    assert (fit.base_s, fit.touch_s) == (pytest.approx(5e-5), 0.0)


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        (TOKENS[:5], TOKENS, "differ in length"),
        (TOKENS[:1], TOKENS[:1], "1 measurements"),
        (TOKENS * np.nan, TOKENS, "not finite"),
        (TOKENS, TOKENS * 0, "a time is 0"),
        (TOKENS, TOKENS * np.inf, "not finite"),
    ],
)
def test_measurements_that_cannot_be_fitted_are_refused(tokens, seconds, message):
    touched = TOUCHED[: len(seconds)]
    with pytest.raises(ConfigError, match=message):
        fit_kernels(tokens, touched, seconds)


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"top_k": 9}, {"num_ranks": 3}, {"exponent": 0.0}],
)
def test_draws_that_make_no_sense_are_refused(wrong):
    case = {"tokens": 64, "num_experts": 8, "top_k": 2, "num_ranks": 4, "exponent": 1.2} | wrong
    with pytest.raises(ConfigError, match="power-law draw"):
        draw_busiest_rank(np.random.default_rng(0), **case)


def test_the_exponent_one_is_the_limit_of_its_neighbours():
    at, near = (
        draw_busiest_rank(
            np.random.default_rng(5),
            tokens=1000,
            num_experts=16,
            top_k=1,
            num_ranks=4,
            exponent=exponent,
        )
        for exponent in (1.0, 1.0 + 1e-9)
    )
    assert (at == near).all()
