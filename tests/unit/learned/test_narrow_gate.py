"""Gates that compute in bfloat16 for many bfloat16 states, and only then."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moeless.core.router import RouterRule  # noqa: E402 - after the skip
from moeless.learned import narrow_gate  # noqa: E402
from moeless.learned.gate_predictor import Gate, GatePredictor  # noqa: E402
from moeless.learned.narrow_gate import NarrowGate, narrowed  # noqa: E402
from moeless.learned.trained_predictor import TrainedPredictor  # noqa: E402

EXPERTS, HIDDEN, MANY = 8, 256, 512
RULE = RouterRule(kind="topk_softmax", path="router", top_k=2)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """As on a processor that multiplies bfloat16, whatever this one does."""
    monkeypatch.setattr(narrow_gate, "is_bfloat16_fast", lambda _: True)


def make_gate(*, bias=True, correction=None, rule=RULE):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator) / 16
    return Gate(weight, torch.linspace(-1, 1, EXPERTS) if bias else None, rule, correction)


def draw(tokens, dtype=torch.bfloat16):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_many_narrow_states_give_nearly_the_same_logits(bias):
    gate, x = make_gate(bias=bias), draw(MANY)
    narrow = NarrowGate(gate).logits(x)
    assert narrow.dtype == torch.float32
    error = (narrow - gate.logits(x)).abs()
    assert 0.0 < error.max() < 0.02 * gate.logits(x).abs().max()


@pytest.mark.parametrize("x", [draw(8), draw(MANY, torch.float32)], ids=["few", "wide"])
def test_few_states_and_wide_ones_are_asked_as_before(x):
    gate = make_gate()
    assert torch.equal(NarrowGate(gate).logits(x), gate.logits(x))


def test_parameters_are_those_of_the_gate_alone():
    gate = make_gate()
    narrow = NarrowGate(gate)
    narrow.logits(draw(MANY))
    assert narrow.tensors == gate.tensors
    assert (narrow.rule, narrow.correction) == (gate.rule, gate.correction)


def test_gates_that_are_narrow_already_stay_as_they_are():
    gate = make_gate()._replace(weight=torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16))
    assert narrowed(gate) is gate


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_forecasts_of_many_tokens_hardly_change(spread):
    gates = [make_gate(), make_gate()]
    trained = TrainedPredictor(gates[1:], 1, hidden=HIDDEN, spreads=[spread])
    x = draw(MANY)
    for predictor in (trained, GatePredictor(gates)):
        narrow, wide = predictor.predict(0, x), predictor.predict(0, x.float())
        assert narrow.sum() == pytest.approx(2 * MANY)
        assert np.abs(narrow - wide).sum() / 2 < 0.01 * 2 * MANY
