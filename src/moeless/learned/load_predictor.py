"""The port behind which every predictor that computes stands.

``moeless.core.ports.Predictor`` looks back over loads; these look ahead from hidden states.
"""

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from moeless.core.plan import CountArray, LoadArray

Reads = Literal["gate_input", "layer_input"]
"""What a predictor is given of a layer: what enters its gate, or what enters the whole layer."""


class LoadPredictor(Protocol):
    """Expects the load of layer ``layer + distance`` from hidden states of ``layer``."""

    @property
    def distance(self) -> int:
        """d, how many layers ahead it predicts."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of its parameters."""
        ...

    @property
    def reads(self) -> Reads:
        """Which hidden states it is given."""
        ...

    def predict(self, layer: int, x_TH: Tensor) -> LoadArray | CountArray | None:
        """Expected tokens per expert of layer ``layer + distance``.

        Args:
            layer: MoE layer that is about to run.
            x_TH: Its hidden states [..., H], any float dtype.

        Returns:
            [E], summing to T x K; None where the model has no such layer.
        """
        ...

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """How much of each token every expert is expected to get.

        Args:
            layer: As for ``predict``.
            x_TH: As for ``predict``.

        Returns:
            float32 [T, E]; loads are sums over tokens, made whole by ``finish_load``. The K
            largest of a row are the experts expected for that token.
        """
        ...


class SharePredictor:
    """Base of predictors that say what each token does: loads are sums.

    Args:
        distance: How many layers ahead to predict.
        top_k: K.
    """

    reads: Reads = "gate_input"

    def __init__(self, *, distance: int, top_k: int) -> None:
        self.distance = distance
        self.top_k = top_k

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """See ``LoadPredictor``."""
        raise NotImplementedError

    def predict(self, layer: int, x_TH: Tensor) -> LoadArray | None:
        """Expected tokens per expert, float64 [E]; see ``LoadPredictor``."""
        with torch.inference_mode():
            share_TE = self.shares(layer, x_TH)
            if share_TE is None:
                return None
            summed_E: LoadArray = share_TE.sum(dim=0).double().cpu().numpy()
        return finish_load(summed_E, len(share_TE) * self.top_k)


def finish_load(load_NE: LoadArray, assignments: float | LoadArray) -> LoadArray:
    """Cut expected loads off at zero and scale them to what they must sum to.

    Args:
        load_NE: Summed shares [..., E].
        assignments: Tokens x K, one number or [...].

    Returns:
        float64 [..., E].
    """
    load_NE = np.maximum(load_NE, 0.0)
    total_N = load_NE.sum(axis=-1, keepdims=True)
    scaled: LoadArray = (
        load_NE * np.asarray(assignments)[..., None] / np.where(total_N > 0.0, total_N, 1.0)
    )
    return scaled
