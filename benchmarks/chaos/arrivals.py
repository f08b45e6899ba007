"""When requests arrive: a recorded trace scaled to a rate, or a bursty process."""

import os
from pathlib import Path

import numpy as np

from moeless.workloads.arrivals import read_arrivals

TRACE = "AzureLLMInferenceTrace_conv.csv"
_BURST_RATE = 4.0
_BURST_SHARE = 0.15
_MEAN_BURST_S = 5.0


def find_trace() -> Path | None:
    """The Azure trace of conversations, where ``MOELESS_DATA_DIR`` has it."""
    folder = os.environ.get("MOELESS_DATA_DIR")
    path = Path(folder) / "arrivals" / TRACE if folder else None
    return path if path is not None and path.is_file() else None


def arrival_times(
    trace: Path | None, *, seconds: float, count: int, seed: int
) -> tuple[list[float], str]:
    """Seconds at which ``count`` requests arrive, and where they come from.

    A trace keeps its bursts: a stretch of ``count`` requests, chosen by the seed, is stretched or
    compressed to the given time.
    """
    chance = np.random.default_rng(seed)
    if trace is None:
        return _bursty(chance, seconds, count), "built-in bursty process (no trace was given)"
    all_s = read_arrivals(trace).time_s_R
    first = int(chance.integers(0, max(1, len(all_s) - count)))
    times_s = all_s[first : first + count] - all_s[first]
    scale = seconds / max(float(times_s[-1]), 1e-9)
    where = f"{trace.name}, requests {first} to {first + len(times_s) - 1}, time x {scale:.3g}"
    return (times_s * scale).tolist(), where


def _bursty(chance: np.random.Generator, seconds: float, count: int) -> list[float]:
    """Poisson arrivals whose rate is four times as high in bursts of about five seconds."""
    edges, rates, now_s = [0.0], [], 0.0
    while now_s < seconds:
        for rate, mean_s in (
            (1.0, _MEAN_BURST_S * (1 - _BURST_SHARE) / _BURST_SHARE),
            (_BURST_RATE, _MEAN_BURST_S),
        ):
            now_s = min(seconds, now_s + float(chance.exponential(mean_s)))
            edges.append(now_s)
            rates.append(rate)
    mass = np.concatenate([[0.0], np.cumsum(np.diff(edges) * rates)])
    drawn = np.sort(chance.uniform(0.0, mass[-1], count))
    return np.interp(drawn, mass, edges).tolist()
