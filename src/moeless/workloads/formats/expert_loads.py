"""What every load format is turned into: tokens per layer and logical expert.

This module must not know any file format.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError

LoadMatrix = NDArray[np.int64 | np.float64]

_LARGEST = 2.0**53


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the caller knows of the model, to hold a file against.

    Args:
        num_experts: E, logical experts per layer, or None.
        num_layers: L, MoE layers, or None.
        origin: Where that is from, for messages, for example ``--experts``.
    """

    num_experts: int | None = None
    num_layers: int | None = None
    origin: str = "the model"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoads:
    """Tokens per layer and logical expert, summed over what was recorded.

    Args:
        loads_LE: Tokens routed to each logical expert, int64 (or float64 where the file has
            fractions) [L, E].
        layer_ids: Absolute index of each layer in the model, ascending, length L.
        source: The file and its format, for reports.
        steps: Iterations, requests or captures that were added up.
        top_k: K, experts per token, where the file tells.

    Raises:
        TraceError: Shapes that do not match, layer ids out of order, or a value that is no token
            count; the message names layer and expert.
    """

    loads_LE: LoadMatrix
    layer_ids: tuple[int, ...]
    source: str
    steps: int
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.loads_LE.ndim != 2 or 0 in self.loads_LE.shape:
            shape = self.loads_LE.shape
            raise TraceError(f"{self.source}: shape {shape}, expected [layers, experts]")
        if len(self.layer_ids) != len(self.loads_LE):
            raise TraceError(
                f"{self.source}: {len(self.layer_ids)} layer ids for {len(self.loads_LE)} layers"
            )
        if list(self.layer_ids) != sorted(set(self.layer_ids)) or self.layer_ids[0] < 0:
            raise TraceError(
                f"{self.source}: layer ids {_shorten(self.layer_ids)} are not ascending from 0 up"
            )
        good_LE = (self.loads_LE >= 0) & (self.loads_LE <= _LARGEST)
        if not good_LE.all():
            layer, expert = np.argwhere(~good_LE)[0]
            raise TraceError(
                f"{self.source}: layer {self.layer_ids[layer]}, expert {expert}: load "
                f"{self.loads_LE[layer, expert]} is not a token count; loads are finite, not "
                f"negative and at most 2^53"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.loads_LE.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.loads_LE.shape[1])


def _shorten(ids: tuple[int, ...]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, ..." if len(ids) > 8 else shown
