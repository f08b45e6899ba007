"""Pictures of a replay: layer times, balance, replicas and cold starts. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeless.errors import ConfigError, MissingExtraError, os_reason
from moeless.simulator.metrics import straggler_ratio_SL
from moeless.simulator.recording import FloatArray, Recording, num_warm_up_steps

_POINTS = 400
"""Points of a curve over time; steps between two of them are averaged."""


def write_plots(
    recordings: Mapping[str, Recording], loads_SLE: np.ndarray[Any, Any], directory: Path
) -> list[Path]:
    """Draw ``layer_forward_cdf.png``, ``straggler_ratio.png`` and ``replicas.png``.

    Args:
        recordings: Policy to recording.
        loads_SLE: Tokens of each expert [S, L, E].
        directory: Where to; made if it is missing.

    Returns:
        The files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: The directory cannot be written to.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    try:
        directory.mkdir(parents=True, exist_ok=True)
        total_SL = loads_SLE.sum(axis=2, dtype=np.int64)
        drawings = {
            "layer_forward_cdf.png": _draw_layer_times,
            "straggler_ratio.png": _draw_straggler_ratio,
            "replicas.png": _draw_replicas,
        }
        paths = []
        for name, draw in drawings.items():
            figure = Figure(figsize=(7.5, 4.5), layout="constrained")
            draw(figure, recordings, total_SL)
            figure.savefig(directory / name, dpi=120)
            paths.append(directory / name)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written to ({os_reason(error)})") from error
    return paths


def require_matplotlib() -> None:
    """Say early that plots cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "plots need matplotlib; run pip install 'moeless[replay]'"
        ) from error


def _draw_layer_times(figure: Any, recordings: Mapping[str, Recording], total_SL: Any) -> None:
    axes = figure.subplots()
    for name, recording in recordings.items():
        first = num_warm_up_steps(recording.num_steps)
        times_ms = np.sort(recording.layer_s_SL[first:][total_SL[first:] > 0]) * 1e3
        if len(times_ms):
            picked = np.linspace(0, len(times_ms) - 1, min(len(times_ms), 2000)).astype(int)
            axes.plot(times_ms[picked], (picked + 1) / len(times_ms), label=name)
    axes.set(xlabel="layer forward time (ms)", ylabel="share of layer-steps", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_straggler_ratio(figure: Any, recordings: Mapping[str, Recording], total_SL: Any) -> None:
    axes = figure.subplots()
    for name, recording in recordings.items():
        ratio_SL = straggler_ratio_SL(recording.device_tokens_SLD, total_SL)
        counted_S = np.isfinite(ratio_SL).sum(axis=1)
        mean_S = np.nansum(ratio_SL, axis=1) / np.maximum(counted_S, 1)
        busy_S = counted_S > 0
        axes.plot(*_thin(recording.start_s_S[busy_S], mean_S[busy_S]), label=name)
    axes.set(xlabel="time (s)", ylabel="max ÷ ideal device tokens, mean over layers")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_replicas(figure: Any, recordings: Mapping[str, Recording], total_SL: Any) -> None:
    del total_SL
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, recording in recordings.items():
        time_S = recording.start_s_S
        upper.plot(*_thin(time_S, recording.warm_SL.mean(axis=1)), label=name)
        lower.plot(*_thin(time_S, recording.cold_SL.sum(axis=1).astype(np.float64)), label=name)
    upper.set(ylabel="warm replicas per layer")
    lower.set(xlabel="time (s)", ylabel="cold starts per step")
    for axes in (upper, lower):
        axes.grid(visible=True, alpha=0.3)
    upper.legend()


def _thin(time_S: FloatArray, value_S: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Average neighbouring steps until a curve is readable."""
    if len(time_S) <= _POINTS:
        return time_S, value_S
    edges = np.linspace(0, len(time_S), _POINTS + 1).astype(int)
    sizes = np.diff(edges)
    starts = edges[:-1]
    return (
        np.add.reduceat(time_S, starts) / sizes,
        np.add.reduceat(value_S, starts) / sizes,
    )
