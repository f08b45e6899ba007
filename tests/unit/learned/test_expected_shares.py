"""Expected shares of tokens: the router's choice, or its probability."""

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import EXPERTS, RULES, TOP_K  # noqa: E402 - after the skip
from moeless.core.router import RouterRule  # noqa: E402
from moeless.learned.expected_shares import (  # noqa: E402
    expected_load,
    expected_shares,
    one_hot,
)
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


def drawn_shares(logits_TE, rule, correction, spread, draws=300):
    """What becomes of the choice when logits are really off by normal errors."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros_like(logits_TE)
    for _ in range(draws):
        off_TE = spread * torch.randn(logits_TE.shape, generator=generator)
        total += one_hot(choose(logits_TE + off_TE, rule, correction), logits_TE.shape[1])
    return total / draws


@pytest.mark.parametrize(
    ("experts", "groups", "stay", "top_k"),
    [(64, 8, 4, 6), (16, 4, 2, 3), (8, 8, 3, 2), (8, 4, 2, 4), (32, 1, 1, 4)],
)
@pytest.mark.parametrize("spread", [0.2, 0.7])
def test_chances_within_groups_are_those_of_noisy_logits(experts, groups, stay, top_k, spread):
    rule = RouterRule(
        kind="sigmoid_group",
        path="gate",
        top_k=top_k,
        correction_bias="correction",
        num_groups=groups,
        top_groups=stay,
    )
    generator = torch.Generator().manual_seed(0)
    logits_TE = 2.0 * torch.randn(48, experts, generator=generator)
    correction = 0.1 * torch.randn(experts, generator=generator)
    truth = drawn_shares(logits_TE, rule, correction, spread)
    certain = expected_shares(logits_TE, rule, correction)
    likely = expected_shares(logits_TE, rule, correction, spread=spread)
    assert torch.allclose(likely.sum(dim=1), torch.full((48,), float(top_k)))
    wrong = [float((share_TE - truth).abs().sum()) for share_TE in (certain, likely)]
    assert wrong[1] < 0.7 * wrong[0]


def test_a_group_that_may_not_stay_takes_its_experts_chances_along():
    rule = RouterRule(kind="sigmoid_group", path="gate", top_k=1, num_groups=2, top_groups=1)
    # The second group holds the best expert, the first one the two best together, barely.
    logits_TE = torch.tensor([[0.9, 0.9, 1.0, 0.8]])
    certain = expected_shares(logits_TE, rule)
    assert certain[0, 2:].sum() == 0.0
    likely = expected_shares(logits_TE, rule, spread=0.3)
    assert 0.2 < likely[0, 2:].sum() < 0.8


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_expected_loads_are_sums_of_shares(rule, spread, logits_TE):
    correction = torch.linspace(-0.2, 0.2, EXPERTS) if rule.correction_bias else None
    share_TE = expected_shares(logits_TE, rule, correction, spread=spread)
    load_E = expected_load(logits_TE, rule, correction, spread=spread)
    assert torch.allclose(load_E.float(), share_TE.sum(dim=0), atol=1e-4)


def test_where_all_experts_are_chosen_each_gets_every_token(logits_TE):
    rule = RouterRule(kind="topk_softmax", path="gate", top_k=EXPERTS)
    assert (expected_shares(logits_TE, rule, spread=0.5) == 1.0).all()


def test_no_tokens_have_no_shares():
    assert expected_shares(torch.zeros(0, EXPERTS), RULES["topk_softmax"], spread=1.0).shape == (
        0,
        EXPERTS,
    )
