import pytest

from moeless.learned.accuracy import load_accuracy


@pytest.mark.parametrize(
    ("predicted", "actual", "accuracy"),
    [
        ([4, 0], [4, 0], 1.0),
        ([4, 0], [0, 4], 0.0),
        ([3, 1], [4, 0], 0.75),
        ([0, 0], [2, 2], 0.5),
        ([9, 9], [1, 1], 0.0),
        ([0, 0], [0, 0], 1.0),
        ([1, 0], [0, 0], 0.0),
    ],
)
def test_accuracy_is_the_share_of_tokens_predicted_for_the_right_expert(
    predicted, actual, accuracy
):
    assert load_accuracy(predicted, actual) == accuracy


def test_another_number_of_experts_is_refused():
    with pytest.raises(ValueError, match="predicted loads"):
        load_accuracy([1, 2], [1, 2, 3])
