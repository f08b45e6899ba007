import pytest

torch = pytest.importorskip("torch")

from moeless.learned.training_options import TrainingOptions  # noqa: E402 - after the skip
from moeless.learned.training_threads import layers_at_once, training_threads  # noqa: E402


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("hidden", "threads"), [(576, 1), (4096, 4)])
def test_small_layers_are_fitted_by_one_thread(hidden, threads):
    with training_threads(hidden):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("method", "hidden", "layers"),
    [("ridge", 576, 1), ("finetune", 576, 4), ("mlp", 576, 4), ("mlp", 4096, 1)],
)
def test_several_small_layers_descend_at_once(method, hidden, layers):
    assert layers_at_once(TrainingOptions(method=method), hidden) == layers


@pytest.mark.usefixtures("four_threads")
def test_a_failure_gives_the_threads_back():
    with pytest.raises(KeyboardInterrupt), training_threads(576):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 4
