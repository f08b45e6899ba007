"""Expected shares of tokens: the router's choice, or its probability."""

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import EXPERTS, RULES, TOP_K  # noqa: E402 - after the skip
from moeless.core.router import RouterRule  # noqa: E402
from moeless.learned.expected_shares import expected_shares, one_hot  # noqa: E402
from moeless.learned.scoring import choose  # noqa: E402


@pytest.fixture
def logits_TE():
    return torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_without_spread_shares_are_the_choice(rule, logits_TE):
    correction = torch.linspace(-0.2, 0.2, EXPERTS) if rule.correction_bias else None
    share_TE = expected_shares(logits_TE, rule, correction)
    assert torch.equal(share_TE, one_hot(choose(logits_TE, rule, correction), EXPERTS))
    assert (share_TE.sum(dim=1) == TOP_K).all()


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax", "sparsemixer", "topk_sigmoid"])
def test_with_spread_shares_are_probabilities_in_the_order_of_logits(kind, logits_TE):
    share_TE = expected_shares(logits_TE, RULES[kind], spread=0.5)
    assert torch.allclose(share_TE.sum(dim=1), torch.full((40,), float(TOP_K)))
    assert torch.equal(share_TE.argsort(dim=1), logits_TE.argsort(dim=1))
    assert ((share_TE > 0.05) & (share_TE < 0.95)).any()


def test_a_tiny_spread_is_the_choice(logits_TE):
    rule = RULES["topk_softmax"]
    share_TE = expected_shares(logits_TE, rule, spread=1e-6)
    assert torch.allclose(share_TE, expected_shares(logits_TE, rule), atol=1e-3)


def test_near_ties_are_shared():
    rule = RouterRule(kind="topk_softmax", path="gate", top_k=1)
    share_TE = expected_shares(torch.tensor([[1.0, 1.0, -9.0]]), rule, spread=0.3)
    assert torch.allclose(share_TE, torch.tensor([[0.5, 0.5, 0.0]]), atol=1e-4)


def test_choices_within_groups_are_counted_whatever_the_spread(logits_TE):
    rule, correction = RULES["sigmoid_group"], torch.zeros(EXPERTS)
    certain = expected_shares(logits_TE, rule, correction)
    assert torch.equal(expected_shares(logits_TE, rule, correction, spread=0.5), certain)


def test_where_all_experts_are_chosen_each_gets_every_token(logits_TE):
    rule = RouterRule(kind="topk_softmax", path="gate", top_k=EXPERTS)
    assert (expected_shares(logits_TE, rule, spread=0.5) == 1.0).all()


def test_no_tokens_have_no_shares():
    assert expected_shares(torch.zeros(0, EXPERTS), RULES["topk_softmax"], spread=1.0).shape == (
        0,
        EXPERTS,
    )
