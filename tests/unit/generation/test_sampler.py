"""Choosing tokens: greedy, filters, seeds, log-probabilities."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from moeless.core.generation import SamplingParams  # noqa: E402 - torch is optional
from moeless.engines.transformers.generation.sampler import (  # noqa: E402
    RowSampler,
    find_best,
)
from moeless.errors import EngineError  # noqa: E402


def choose(logits, sampler, row=0):
    return sampler.choose(logits, row, find_best(logits)[row])


def draws(logits, count=400, **params):
    sampler = RowSampler(SamplingParams(**params))
    return [choose(logits, sampler).token_id for _ in range(count)]


def random_logits(rows=1, vocabulary=50, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_temperature_zero_takes_the_largest_logit():
    logits = random_logits(3)
    sampler = RowSampler(SamplingParams(temperature=0))
    found = [choose(logits, sampler, row).token_id for row in range(3)]
    assert found == logits.argmax(dim=-1).tolist()


def test_top_k_of_one_and_a_tiny_temperature_are_greedy():
    logits = random_logits()
    best = int(logits.argmax())
    assert set(draws(logits, temperature=2.0, top_k=1)) == {best}
    assert set(draws(logits, temperature=1e-30)) == {best}


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    alone = random_logits()
    sampler = RowSampler(SamplingParams(temperature=1.0, seed=7))
    expected = [choose(alone, sampler).token_id for _ in range(30)]
    crowded = torch.cat([random_logits(2, seed=5), alone, random_logits(1, seed=6)])
    sampler = RowSampler(SamplingParams(temperature=1.0, seed=7))
    neighbour = RowSampler(SamplingParams(temperature=0.3, seed=7))
    found = []
    for _ in range(30):
        choose(crowded, neighbour, 1)
        found.append(choose(crowded, sampler, 2).token_id)
    assert found == expected


def test_different_seeds_and_no_seed_differ():
    logits = random_logits()
    assert draws(logits, 60, temperature=1.5, seed=1) != draws(logits, 60, temperature=1.5, seed=2)
    assert draws(logits, 60, temperature=1.5) != draws(logits, 60, temperature=1.5)


def test_seeds_of_any_size_and_sign_are_accepted():
    logits = random_logits()
    for seed in (0, -1, 2**63, 2**80 + 5):
        assert draws(logits, 5, temperature=1.0, seed=seed) == draws(
            logits, 5, temperature=1.0, seed=seed
        )


def test_frequencies_follow_the_softmax_of_the_scaled_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        counts = Counter(draws(logits, 6000, temperature=temperature, seed=3))
        expected = (logits[0] / temperature).softmax(dim=-1)
        for token_id in range(4):
            assert counts[token_id] / 6000 == pytest.approx(float(expected[token_id]), abs=0.03)


def test_top_k_keeps_the_k_likeliest():
    logits = random_logits()
    kept = set(logits[0].topk(3).indices.tolist())
    assert set(draws(logits, temperature=5.0, top_k=3, seed=0)) == kept


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(draws(logits, temperature=1.0, top_p=0.5, seed=0)) == {0}
    assert set(draws(logits, temperature=1.0, top_p=0.51, seed=0)) == {0, 1}
    assert set(draws(logits, temperature=1.0, top_p=0.9, seed=0)) == {0, 1, 2}
    assert set(draws(logits, temperature=1.0, top_p=1e-9, seed=0)) == {0}


def test_top_p_counts_mass_within_the_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the top two, the first has 4/7 of the mass.
    assert set(draws(logits, temperature=1.0, top_k=2, top_p=0.55, seed=0)) == {0}
    assert set(draws(logits, temperature=1.0, top_k=2, top_p=0.6, seed=0)) == {0, 1}


def test_a_nucleus_wider_than_the_candidates_is_still_complete():
    logits = torch.zeros(1, 5000)
    found = set(draws(logits, 3000, temperature=1.0, top_p=0.9, seed=0))
    assert 1500 < len(found) <= 4500


def test_a_nucleus_within_the_candidates_ignores_the_tail():
    logits = torch.full((1, 5000), -8.0)
    logits[0, 77] = 6.0
    logits[0, 4000] = 5.0
    assert set(draws(logits, 500, temperature=1.0, top_p=0.5, seed=0)) == {77}


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits()
    expected = logits[0].log_softmax(dim=-1)
    sampler = RowSampler(SamplingParams(temperature=3.0, top_k=5, seed=1, logprobs=4))
    choice = choose(logits, sampler)
    assert choice.logprob == pytest.approx(float(expected[choice.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in choice.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in choice.top] == pytest.approx(expected.topk(4).values.tolist())


def test_no_logprobs_unless_asked_and_no_alternatives_for_zero():
    logits = random_logits()
    assert choose(logits, RowSampler(SamplingParams())).logprob is None
    choice = choose(logits, RowSampler(SamplingParams(logprobs=0)))
    assert choice.logprob is not None
    assert choice.top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_only(bad):
    logits = random_logits(2)
    logits[0, 3] = bad
    sampler = RowSampler(SamplingParams(temperature=1.0))
    with pytest.raises(EngineError, match="not finite"):
        choose(logits, sampler, 0)
    assert 0 <= choose(logits, sampler, 1).token_id < 50


def test_masked_logits_of_minus_infinity_are_never_drawn():
    logits = random_logits()
    logits[0, ::2] = -float("inf")
    assert all(token_id % 2 for token_id in draws(logits, temperature=5.0, seed=2))
