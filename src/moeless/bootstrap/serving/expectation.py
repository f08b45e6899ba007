"""From predictors to what the token path announces."""

import torch

from moeless.functions.token_path.announcer import ExpectedLoad
from moeless.learned.first_layers import FirstLayers
from moeless.learned.trained_predictor import TrainedPredictor


def expect(predictor: TrainedPredictor, layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
    """What a trained predictor expects of layer + d, and how far off it expects to be.

    Args:
        predictor: The predictor.
        layer: MoE layer that is about to run.
        x_TH: Its gate input [T, H].
    """
    load_E = predictor.predict(layer, x_TH)
    if load_E is None:
        return None
    error = predictor.error(layer)
    if error is None:
        return ExpectedLoad(load_E)
    return ExpectedLoad(load_E, error.mean_at(len(x_TH)))


def expect_first(first: FirstLayers, embedding_TH: torch.Tensor) -> dict[int, ExpectedLoad]:
    """What is expected of the first d layers, by layer; those that are not known are left out.

    Args:
        first: Their predictors.
        embedding_TH: What enters the model's first layer [T, H].
    """
    return {
        layer: ExpectedLoad(load_E, first.errors[layer].mean_at(len(embedding_TH)))
        if layer in first.errors
        else ExpectedLoad(load_E)
        for layer, load_E in first.predict(embedding_TH).items()
    }
