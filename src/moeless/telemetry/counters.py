"""Running totals of one model, cheap enough for the token path."""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray


class LayerStatsDict(TypedDict):
    """The JSON form of ``LayerStats``.

    Lists are indexed [layer]; ``tokens`` [layer][expert], ``device_tokens`` [layer][device]. A
    straggler ratio is null for a layer that has not had tokens yet.
    """

    layer_steps: list[int]
    tokens: list[list[int]]
    device_tokens: list[list[int]]
    straggler_mean: list[float | None]
    straggler_last: list[float | None]
    straggler_static: list[float | None]
    warm_starts: list[int]


class LayerStats:
    """Counts per layer, expert and device since the model was loaded.

    One thread records; others may read at any time and may see a layer-step in part.

    Args:
        num_layers: L.
        num_experts: E.
        num_devices: D.
    """

    def __init__(self, *, num_layers: int, num_experts: int, num_devices: int) -> None:
        self._tokens_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._device_tokens_LD = np.zeros((num_layers, num_devices), dtype=np.int64)
        self._steps_L = np.zeros(num_layers, dtype=np.int64)
        self._ratio_sum_L = np.zeros(num_layers, dtype=np.float64)
        self._ratio_last_L = np.full(num_layers, np.nan)
        self._static_sum_L = np.zeros(num_layers, dtype=np.float64)
        self._static_starts: tuple[int, NDArray[np.int64]] = (0, np.zeros(0, dtype=np.int64))
        self._warm_L = np.zeros(num_layers, dtype=np.int64)

    def record_split(
        self,
        layer: int,
        *,
        count_E: CountArray,
        device_tokens_D: CountArray,
        in_use: int | None = None,
    ) -> None:
        """Count the tokens of one layer in one step; a step without tokens is left out.

        Args:
            layer: MoE layer.
            count_E: Tokens routed to each expert [E].
            device_tokens_D: Tokens each device computes, of the first ones [at most D].
            in_use: Devices that could have had some; None for all.
        """
        tokens: list[int] = device_tokens_D.tolist()
        total = sum(tokens)
        if not total:
            return
        # A device that has just left may have had tokens, too.
        in_use = max(in_use or len(tokens), len(tokens) - tokens.count(0))
        mean = -(-total // in_use)
        ratio = max(tokens) / mean
        self._tokens_LE[layer] += count_E
        self._device_tokens_LD[layer, : len(tokens)] += device_tokens_D
        self._ratio_sum_L[layer] += ratio
        self._ratio_last_L[layer] = ratio
        if self._static_starts[0] != in_use:
            self._static_starts = in_use, _static_starts(len(count_E), in_use)
        static_D = np.add.reduceat(count_E, self._static_starts[1])
        self._static_sum_L[layer] += int(static_D.max()) / mean
        self._steps_L[layer] += 1

    def record_warm_starts(self, layer: int, count: int) -> None:
        """Count experts whose tokens found a warm replica."""
        self._warm_L[layer] += count

    @property
    def tokens_LE(self) -> CountArray:
        """Tokens routed to each expert, a copy [L, E]."""
        return self._tokens_LE.copy()

    @property
    def device_tokens_LD(self) -> CountArray:
        """Tokens computed by each device, a copy [L, D]."""
        return self._device_tokens_LD.copy()

    @property
    def layer_steps_L(self) -> CountArray:
        """Steps in which the layer had tokens, a copy [L]."""
        return self._steps_L.copy()

    @property
    def straggler_mean_L(self) -> NDArray[np.float64]:
        """Mean over steps of max device tokens / ceil(mean device tokens) [L]; NaN before any."""
        mean: NDArray[np.float64] = np.full(len(self._steps_L), np.nan)
        np.divide(self._ratio_sum_L, self._steps_L, out=mean, where=self._steps_L > 0)
        return mean

    @property
    def straggler_static_mean_L(self) -> NDArray[np.float64]:
        """The mean that static expert parallelism would have had for the same loads [L].

        Each device has a contiguous block of experts, one replica each; NaN before any step.
        """
        mean: NDArray[np.float64] = np.full(len(self._steps_L), np.nan)
        np.divide(self._static_sum_L, self._steps_L, out=mean, where=self._steps_L > 0)
        return mean

    @property
    def straggler_last_L(self) -> NDArray[np.float64]:
        """The ratio of the newest step, a copy [L]; NaN before any."""
        return self._ratio_last_L.copy()

    @property
    def warm_starts_L(self) -> CountArray:
        """Experts whose tokens found a warm replica, a copy [L]."""
        return self._warm_L.copy()

    @property
    def warm_starts(self) -> int:
        """Experts whose tokens found a warm replica, all layers and steps."""
        return int(self._warm_L.sum())

    def to_dict(self) -> LayerStatsDict:
        """Everything, ready for JSON."""
        return {
            "layer_steps": self._steps_L.tolist(),
            "tokens": self._tokens_LE.tolist(),
            "device_tokens": self._device_tokens_LD.tolist(),
            "straggler_mean": without_nan(self.straggler_mean_L),
            "straggler_last": without_nan(self._ratio_last_L),
            "straggler_static": without_nan(self.straggler_static_mean_L),
            "warm_starts": self._warm_L.tolist(),
        }


def _static_starts(num_experts: int, num_devices: int) -> NDArray[np.int64]:
    """Where contiguous blocks of experts begin; devices without any are left out."""
    share, rest = divmod(num_experts, num_devices)
    sizes_D = np.array([share + (device < rest) for device in range(num_devices)])
    starts: NDArray[np.int64] = (np.cumsum(sizes_D) - sizes_D)[sizes_D > 0]
    return starts


def without_nan(values: NDArray[np.float64]) -> list[float | None]:
    """A list in which None, JSON's null, stands for NaN, which JSON does not know."""
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN
