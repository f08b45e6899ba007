"""Gradient descent on copied gates and perceptrons, for every scoring rule."""

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import EXPERTS, HIDDEN, RULES, draw_gates, draw_states  # noqa: E402
from moeless.learned.expected_shares import expected_shares, one_hot  # noqa: E402
from moeless.learned.gradient import DescentOptions, finetune_gate, train_mlp  # noqa: E402
from moeless.learned.mlp import new_mlp  # noqa: E402
from moeless.learned.scoring import choose  # noqa: E402
from moeless.learned.soft_targets import RoutingLoss  # noqa: E402

OPTIONS = DescentOptions(epochs=15, minibatch=64)


def recall(states, gate):
    """A judge: how many of the experts of other tokens a model knows."""
    true_TE = one_hot(choose(gate.logits(states[:, 1]), gate.rule, gate.correction), EXPERTS)

    def judge(model):
        with torch.inference_mode():
            share_TE = expected_shares(model.logits(states[:, 0]), model.rule, model.correction)
        return float((share_TE * true_TE).sum() / true_TE.sum())

    return judge


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_fine_tuning_learns_the_rotation_between_layers(rule, scale):
    if rule.kind == "sigmoid_group" and scale < 1.0:
        pytest.skip("its correction bias alone would choose")
    gate = draw_gates(rule)[1]
    gate = gate._replace(weight=gate.weight * scale)
    states, other = draw_states(1500), draw_states(300, seed=7)
    judge = recall(other, gate)
    logits_TE = gate.logits(states[:, 1])
    tuned, epochs = finetune_gate(
        gate, states[:, 0], logits_TE, judge=judge, options=OPTIONS, enough=1.0
    )
    assert judge(tuned) > judge(gate) + 0.25
    assert 1 <= epochs <= OPTIONS.epochs
    assert tuned.rule == rule
    assert (tuned.correction is None) == (gate.correction is None)


def test_it_ends_once_it_is_good_enough():
    gate, states = draw_gates()[1], draw_states(600)
    judge = recall(draw_states(200, seed=7), gate)
    _, epochs = finetune_gate(
        gate,
        states[:, 0],
        gate.logits(states[:, 1]),
        judge=judge,
        options=OPTIONS,
        enough=judge(gate) + 0.05,
    )
    assert epochs < OPTIONS.epochs


def test_a_gate_that_cannot_get_better_stays_as_it_is():
    gate, states = draw_gates()[1], draw_states(200, still=(1,))
    tuned, epochs = finetune_gate(
        gate,
        states[:, 0],
        gate.logits(states[:, 1]),
        judge=recall(states, gate),
        options=OPTIONS,
        enough=2.0,
    )
    assert tuned is gate
    assert epochs == OPTIONS.patience


def test_a_perceptron_learns_from_nothing():
    gate, states = draw_gates()[1], 0.01 * draw_states(1500)
    judge = recall(0.01 * draw_states(300, seed=7), gate)
    new = new_mlp(HIDDEN, EXPERTS, gate.rule, torch.Generator().manual_seed(0), input_scale=0.01)
    chosen_TE = one_hot(choose(gate.logits(states[:, 1]), gate.rule), EXPERTS)
    mlp, _ = train_mlp(new, states[:, 0], chosen_TE, judge=judge, options=OPTIONS)
    assert judge(mlp) > 0.65 > judge(new) + 0.2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_targets_are_scored_by_the_rule(rule):
    logits_TE = torch.tensor([[2.0, 1.0, -1.0, -2.0] * 2])
    target_TE = RoutingLoss(logits_TE, rule).targets(logits_TE)
    if "sigmoid" in rule.kind:
        assert torch.equal(target_TE, logits_TE.sigmoid())
        return
    assert float(target_TE.sum()) == pytest.approx(1.0)
    chosen = target_TE > 0
    assert int(chosen.sum()) == (rule.top_k if rule.kind == "topk_softmax" else EXPERTS)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_true_logits_have_the_least_loss(rule):
    logits_TE = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(0))
    loss = RoutingLoss(logits_TE, rule)
    target_TE = loss.targets(logits_TE)
    assert loss(logits_TE, target_TE) < loss(logits_TE.roll(1, dims=1), target_TE)
