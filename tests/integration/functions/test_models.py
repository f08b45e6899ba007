"""Two models on the same workers, with too little memory for both at full size."""

import threading

import pytest

from families import make_tiny
from moeless.core.memory_share import MemoryShare
from moeless.errors import FunctionError
from moeless.functions.compute.experts import function_bytes

pytestmark = pytest.mark.slow

SLOTS = 20  # of the small model, on each of two devices; one copy of all it has takes 12


@pytest.fixture(scope="module")
def larger(tmp_path_factory, tokens_of):
    """A checkpoint whose experts are twice as large, and its tokens."""
    model = make_tiny("mixtral", seed=7, intermediate_size=96)
    directory = tmp_path_factory.mktemp("larger")
    model.save_pretrained(directory)
    return directory, tokens_of(model)


@pytest.fixture(scope="module")
def pair(serve, reference, larger):
    """A model that is guaranteed a third of each device, and one that is guaranteed nothing."""
    small = serve(reference[0], slots=SLOTS, share=MemoryShare(fraction=0.3))
    large = serve(larger[0], devices=None, pool=small.runtime.supervisor.directory.path)
    yield small, large
    large.close()
    small.close()


def held_D(served):
    return served.client.report()["resident_bytes_D"]


def test_each_answers_as_if_it_were_alone_one_after_the_other_and_at_the_same_time(
    pair, reference, larger, tokens_of
):
    small, large = pair
    for _ in range(2):
        assert tokens_of(small.model) == reference[1]
        assert tokens_of(large.model) == larger[1]
    results = {}

    def generate(name, served):
        results[name] = [tokens_of(served.model) for _ in range(2)]

    threads = [
        threading.Thread(target=generate, args=item)
        for item in [("small", small), ("large", large)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"small": [reference[1]] * 2, "large": [larger[1]] * 2}
    for served in pair:
        assert served.client.report()["worker_restarts"] == [0, 0]
    budget_D = small.client.report()["budget_bytes_D"]
    peaks = small.client.report()["worker_peak_bytes"]
    assert all(peak <= budget for peak, budget in zip(peaks, budget_D, strict=True))


def test_the_idle_one_yields_to_the_busy_one_and_keeps_what_it_is_guaranteed(
    pair, reference, larger, tokens_of, wait_until
):
    small, large = pair
    tokens_of(small.model)
    before = sum(held_D(small))
    guaranteed = int(0.3 * SLOTS) * function_bytes(small.loaded.spec.expert, "cpu")

    def yields():
        tokens_of(large.model)
        return sum(held_D(small)) == 2 * guaranteed

    wait_until(yields)
    assert before > 2 * guaranteed
    for _ in range(3):
        assert tokens_of(large.model) == larger[1]
        assert all(held >= guaranteed for held in held_D(small))
    assert tokens_of(small.model) == reference[1]


def test_what_cannot_be_guaranteed_is_refused_in_one_line_and_nobody_notices(
    pair, serve, reference, tokens_of, tmp_path
):
    small, _ = pair
    model = make_tiny("mixtral", seed=3)
    model.save_pretrained(tmp_path / "third")
    pool = small.runtime.supervisor.directory.path
    with pytest.raises(FunctionError, match=r"third asks for 80% .* not guaranteed to others"):
        serve(tmp_path / "third", devices=None, pool=pool, share=MemoryShare(fraction=0.8))
    with pytest.raises(FunctionError, match=r"which leaves room for \d experts of larger0"):
        serve(tmp_path / "third", devices=None, pool=pool, share=MemoryShare(fraction=0.6))
    assert tokens_of(small.model) == reference[1]
