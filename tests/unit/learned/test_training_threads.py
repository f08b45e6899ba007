import pytest

torch = pytest.importorskip("torch")

from moeless.learned.training_options import TrainingOptions  # noqa: E402 - after the skip
from moeless.learned.training_threads import training_threads  # noqa: E402


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("method", "hidden", "threads"),
    [("ridge", 576, 1), ("finetune", 576, 1), ("mlp", 576, 4), ("ridge", 4096, 4)],
)
def test_small_layers_are_fitted_by_one_thread(method, hidden, threads):
    with training_threads(TrainingOptions(method=method), hidden):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_a_failure_gives_the_threads_back():
    with pytest.raises(KeyboardInterrupt), training_threads(TrainingOptions(), 576):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 4
