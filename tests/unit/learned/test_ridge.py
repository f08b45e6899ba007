"""Ridge regression from running sums, at once and from live tokens."""

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import (  # noqa: E402 - after the skip
    EXPERTS,
    HIDDEN,
    LAYERS,
    draw_gates,
    draw_states,
)
from moeless.errors import ConfigError  # noqa: E402
from moeless.learned.online_ridge import OnlineRidge  # noqa: E402
from moeless.learned.ridge import RidgeSums, corrected, prior_residual  # noqa: E402


@pytest.fixture
def gates():
    return draw_gates()


def fit(gates, states, *, chunks=1, penalty=1e-6):
    sums = RidgeSums(HIDDEN, EXPERTS)
    for part in states.chunk(chunks):
        x, ahead = part[:, 0], part[:, 1]
        sums.add(x, prior_residual(gates[1], gates[1], x, ahead))
    return corrected(gates[1], sums.solve(penalty))


def test_a_linear_map_between_layers_is_recovered(gates):
    states = draw_states(300)
    turn = torch.linalg.lstsq(states[:, 0], states[:, 1]).solution
    refitted = fit(gates, states)
    assert torch.allclose(refitted.weight, gates[1].weight @ turn.T, atol=1e-4)
    assert torch.allclose(refitted.bias, torch.zeros(EXPERTS), atol=1e-4)


def test_a_constant_shift_becomes_a_bias(gates):
    states = draw_states(300)
    states[:, 1] = states[:, 0] + 3.0
    refitted = fit(gates, states)
    assert torch.allclose(refitted.bias, gates[1].weight.sum(dim=1) * 3.0, atol=1e-3)


def test_the_number_of_chunks_does_not_matter(gates):
    states = draw_states(300, noise=0.5)
    at_once, in_parts = fit(gates, states), fit(gates, states, chunks=7)
    assert torch.allclose(at_once.weight, in_parts.weight, atol=1e-5)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 1e-2), (300, 1e9)])
def test_without_tokens_or_with_a_huge_penalty_the_copied_gate_is_left(gates, tokens, penalty):
    refitted = fit(gates, draw_states(tokens), penalty=penalty)
    assert torch.allclose(refitted.weight, gates[1].weight, atol=1e-5)


def test_fewer_tokens_than_inputs_have_a_solution(gates):
    refitted = fit(gates, draw_states(3), penalty=1e-3)
    assert refitted.weight.isfinite().all()


def test_what_is_forgotten_weighs_less(gates):
    first, then = draw_states(200, seed=1), draw_states(200, seed=2)
    then[:, 1] = -then[:, 1]
    sums = RidgeSums(HIDDEN, EXPERTS)
    for part in (first, then):
        sums.forget(1e-6)
        sums.add(part[:, 0], prior_residual(gates[1], gates[1], part[:, 0], part[:, 1]))
    assert sums.tokens == pytest.approx(200, rel=1e-3)
    recent = corrected(gates[1], sums.solve(1e-6))
    assert torch.allclose(recent.weight, fit(gates, then).weight, atol=1e-2)


class TestOnline:
    def test_it_comes_to_what_the_model_does(self, gates):
        online = OnlineRidge(gates, 2, penalty=1e-6)
        for seed in range(4):
            online.add(draw_states(100, seed=seed).bfloat16())
            online.fit()
        predictor = online.fit()
        fresh = draw_states(400, seed=99)
        counts = torch.bincount(
            torch.topk(gates[3].logits(fresh[:, 3]), 2, dim=1).indices.ravel(), minlength=EXPERTS
        )
        expected_E = predictor.predict(1, fresh[:, 1])
        assert abs(expected_E - counts.numpy()).sum() / 2 < 0.03 * 800
        assert predictor.spreads[1] > 0.0
        assert online.num_bytes == 8 * (LAYERS - 2) * (HIDDEN + 1) * (HIDDEN + 1 + EXPERTS)

    def test_it_follows_a_change(self, gates):
        online = OnlineRidge(gates, 1, half_life_tokens=50, penalty=1e-6)
        online.add(draw_states(400))
        turned = draw_states(600, still=(1,), seed=5)
        online.add(turned)
        online.fit()
        assert torch.allclose(online.fit().models[0].weight, gates[1].weight, atol=0.1)

    def test_without_tokens_it_asks_the_copied_gates(self, gates):
        predictor = OnlineRidge(gates, 1).fit()
        assert torch.allclose(predictor.models[0].weight, gates[1].weight)

    @pytest.mark.parametrize(
        "options", [{"distance": LAYERS}, {"half_life_tokens": 0.0}, {"penalty": -1.0}]
    )
    def test_wrong_options_are_refused(self, gates, options):
        with pytest.raises(ConfigError, match=r"use 1 to|must be above 0"):
            OnlineRidge(gates, **{"distance": 1, **options})
