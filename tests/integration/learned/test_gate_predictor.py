import pytest

torch = pytest.importorskip("torch")

from moeless.core.router import RouterRule  # noqa: E402 - after the skip
from moeless.errors import ConfigError, ModelError  # noqa: E402
from moeless.learned.gate_predictor import Gate, GatePredictor  # noqa: E402
from moeless.learned.scoring import choose  # noqa: E402

RULE = RouterRule(kind="topk_softmax", path="router", top_k=1)


def gate_to(expert, experts=3, hidden=3):
    """A gate that sends every positive hidden state to one expert."""
    weight = torch.zeros(experts, hidden)
    weight[expert] = 1.0
    return Gate(weight, None, RULE)


def test_the_gate_of_the_layer_ahead_is_asked():
    predictor = GatePredictor([gate_to(0), gate_to(1), gate_to(2)], distance=2)
    assert predictor.predict(0, torch.ones(4, 3)).tolist() == [0, 0, 4]


def test_the_last_layers_have_nothing_to_predict():
    predictor = GatePredictor([gate_to(0), gate_to(1), gate_to(2)], distance=2)
    assert predictor.predict(1, torch.ones(4, 3)) is None


def test_a_batch_of_sequences_is_counted_token_by_token():
    predictor = GatePredictor([gate_to(0), gate_to(1)])
    assert predictor.predict(0, torch.ones(2, 5, 3)).tolist() == [0, 10, 0]


def test_no_tokens_give_a_load_of_zero():
    predictor = GatePredictor([gate_to(0), gate_to(1)])
    assert predictor.predict(0, torch.ones(0, 3)).tolist() == [0, 0, 0]


def test_a_bias_takes_part_in_the_choice():
    biased = Gate(torch.zeros(3, 3), torch.tensor([0.0, 0.0, 1.0]), RULE)
    predictor = GatePredictor([biased, biased])
    assert predictor.predict(0, torch.ones(2, 3)).tolist() == [0, 0, 2]


def test_plain_tuples_are_gates_too():
    predictor = GatePredictor([tuple(gate_to(0))[:3], tuple(gate_to(1))[:3]])
    assert predictor.predict(0, torch.ones(1, 3)).tolist() == [0, 1, 0]


def test_the_copies_do_not_follow_the_model():
    gate = gate_to(1)
    predictor = GatePredictor([gate, gate])
    gate.weight.zero_()
    assert predictor.predict(0, torch.ones(1, 3)).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(torch.float32, 72), (torch.bfloat16, 36), (None, 36)]
)
def test_the_copies_have_the_dtype_asked_for(dtype, num_bytes):
    gate = Gate(gate_to(1).weight.bfloat16(), None, RULE)
    predictor = GatePredictor([gate, gate], dtype=dtype)
    assert predictor.num_bytes == num_bytes
    assert predictor.predict(0, torch.ones(2, 3, dtype=torch.bfloat16)).tolist() == [0, 2, 0]


def test_a_distance_of_zero_is_refused():
    with pytest.raises(ConfigError, match="distance 0"):
        GatePredictor([gate_to(0)], distance=0)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ([], "got none"),
        ([Gate(torch.zeros(3), None, RULE)], r"layer 0: weight \(3,\)"),
        ([Gate(torch.zeros(3, 2), torch.zeros(2), RULE)], r"bias \(2,\), expected \(3,\)"),
        (
            [
                Gate(
                    torch.zeros(3, 2),
                    None,
                    RouterRule(kind="sigmoid_group", path="gate", top_k=1, num_groups=2),
                )
            ],
            "3 experts cannot form 2 groups",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(gates, message):
    with pytest.raises(ModelError, match=message):
        GatePredictor(gates)


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(ModelError, match="'magic' is not known; known are: sigmoid_group"):
        choose(torch.zeros(1, 2), RouterRule(kind="magic", path="gate", top_k=1))
