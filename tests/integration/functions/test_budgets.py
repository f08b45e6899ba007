"""Experts that have to take turns, and experts that cannot be read."""

import pytest
import torch

from moeless.errors import BudgetError, FunctionError, UnavailableError
from moeless.functions.compute.experts import function_bytes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["static", "paper"])
def test_with_room_for_one_layer_only_tokens_are_the_same_and_budgets_are_kept(
    policy, serve, reference, tokens_of
):
    directory, expected = reference
    served = serve(directory, policy=policy, slots=4)  # two devices, eight experts per layer
    assert tokens_of(served.model) == expected
    report = served.client.report()
    budget = 4 * function_bytes(served.loaded.spec.expert, "cpu")
    assert report["evictions"] > 0
    assert report["budget_bytes_D"] == [budget, budget]
    assert all(0 < bytes_ <= budget for bytes_ in report["worker_peak_bytes"])
    assert all(bytes_ <= budget for bytes_ in report["resident_bytes_D"])
    served.close()


def test_a_budget_below_one_layer_is_refused_with_the_least_that_works(serve, reference):
    with pytest.raises(BudgetError, match="give at least"):
        serve(reference[0], slots=3)


def test_a_deleted_shard_is_named_and_the_engine_goes_on_with_what_is_warm(
    serve, checkpoint, tokens_of, expected
):
    served = serve(checkpoint, slots=4)
    assert tokens_of(served.model) == expected
    shard = checkpoint / "model.safetensors"
    hidden = checkpoint / "elsewhere"
    shard.rename(hidden)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"layer \d, expert \d: .*model\.safetensors"):
            tokens_of(served.model)
    assert served.client.report()["worker_restarts"] == [0, 0]

    warm_LE = served.client.board.warm_LED.any(axis=2)
    layer = int(warm_LE.sum(axis=1).argmax())
    warm = warm_LE[layer].nonzero()[0][:2]
    assert len(warm) == 2
    cold = (~warm_LE[layer]).nonzero()[0]
    x_TH = torch.randn(3, served.loaded.spec.expert.hidden)
    weights_TK = torch.full((3, 2), 0.5)
    with torch.inference_mode():
        ids_TK = torch.tensor([warm.tolist()] * 3)
        y_TH = served.runtime.dispatcher(layer, x_TH, ids_TK, weights_TK)
        assert torch.isfinite(y_TH).all()
        if len(cold):
            ids_TK[0, 0] = int(cold[0])
            with pytest.raises(FunctionError, match=f"expert {cold[0]}: .*is missing"):
                served.runtime.dispatcher(layer, x_TH, ids_TK, weights_TK)

    hidden.rename(shard)
    assert tokens_of(served.model) == expected
    served.close()
