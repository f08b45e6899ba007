"""The one place where percentiles are computed."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def percentiles(values: ArrayLike, points: Sequence[float] = (50, 99)) -> dict[str, float]:
    """Exact percentiles with linear interpolation between order statistics.

    Args:
        values: Samples, any shape; NaN is refused.
        points: Percentiles in [0, 100].

    Returns:
        ``{"p50": ..., "p99": ...}`` in the unit of the samples; all 0.0 without samples.

    Raises:
        ValueError: A sample is NaN or a point is out of range.
    """
    samples = np.asarray(values, dtype=np.float64).ravel()
    if np.isnan(samples).any():
        raise ValueError(f"{int(np.isnan(samples).sum())} of {samples.size} samples are NaN")
    names = [f"p{point:g}" for point in points]
    if not samples.size:
        return dict.fromkeys(names, 0.0)
    found: NDArray[np.float64] = np.percentile(samples, np.asarray(points, dtype=np.float64))
    return dict(zip(names, found.tolist(), strict=True))


def summarise(values: ArrayLike) -> dict[str, float]:
    """Mean, p50, p99 and maximum of samples; all 0.0 without samples.

    Raises:
        ValueError: A sample is NaN.
    """
    samples = np.asarray(values, dtype=np.float64).ravel()
    found = percentiles(samples)
    mean, largest = (float(samples.mean()), float(samples.max())) if samples.size else (0.0, 0.0)
    return {"mean": mean, "p50": found["p50"], "p99": found["p99"], "max": largest}


class SampleWindow:
    """The newest samples of a stream, in constant memory.

    ``count`` and ``total`` cover the whole stream; percentiles cover the window. One thread may
    add while others read: a reader may miss the newest sample, never see a torn one.

    Args:
        size: Samples kept, at least 1.
    """

    def __init__(self, size: int = 4096) -> None:
        if size < 1:
            raise ValueError(f"a window of {size} samples keeps nothing")
        self._samples = np.zeros(size, dtype=np.float64)
        self._count = 0
        self._total = 0.0

    @property
    def count(self) -> int:
        """Samples seen in all."""
        return self._count

    @property
    def total(self) -> float:
        """Sum of all samples seen."""
        return self._total

    def add(self, value: float) -> None:
        """Take one sample."""
        self._samples[self._count % len(self._samples)] = value
        self._total += value
        self._count += 1

    def extend(self, values: Iterable[float]) -> None:
        """Take several samples."""
        for value in values:
            self.add(value)

    def percentiles(self, points: Sequence[float] = (50, 99)) -> dict[str, float]:
        """Exact percentiles of the samples in the window; all 0.0 while it is empty."""
        return percentiles(self._samples[: min(self._count, len(self._samples))], points)
