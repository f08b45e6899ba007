"""Tables and plots of layer times that were taken, and of what the simulator made of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeless_experiments.figure import Finding, Plot, Table, Verdict
from moeless_experiments.measured.intervals import Ratio, bootstrap_ratio
from moeless_experiments.plotting import grid
from moeless_experiments.summary import span, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

DEFAULT: Final = "moeless"
_POINTS: Final = 5.0
LABELS: Final = {
    "static": "static EP",
    "eplb": "EPLB",
    "swift": "swift",
    "paper": "MoEless as printed",
    "moeless": "MoEless default",
}
_COLOURS: Final = {
    "static": "#7f7f7f",
    "eplb": "#ff7f0e",
    "swift": "#9467bd",
    "paper": "#2ca02c",
    "moeless": "#1f77b4",
}
_TIME_COLUMNS: Final = (
    *("workload", "policy", "layer_steps"),
    *("mean_ms", "p50_ms", "p99_ms", "mean_computing_ms", "straggler_ratio"),
)
_ERROR_COLUMNS: Final = (
    *("workload", "policy", "taken_mean_ms", "simulated_mean_ms"),
    *("error_of_mean", "median_error", "taken_to_static", "simulated_to_static"),
)
_PERCENTILES: Final = tuple(range(0, 101, 2))


class Times(NamedTuple):
    """One workload's layer times, as far as tables need them.

    Args:
        name: The workload.
        seconds: Policy to layer times; the first axis is what intervals are over.
        computing: Policy to that part of them that the slowest device computed.
        simulated: Policy to simulated ones of the same shape.
        counted: Policy to which of them the simulator can be held against.
        straggler: Policy to the mean ratio of the fullest device's tokens to the mean device's.
    """

    name: str
    seconds: Mapping[str, FloatArray]
    computing: Mapping[str, FloatArray]
    simulated: Mapping[str, FloatArray]
    counted: Mapping[str, NDArray[np.bool_]]
    straggler: Mapping[str, float]

    def ratio(self, policy: str, other: str, *, seed: int) -> Ratio:
        """Mean layer time of one policy ÷ that of another, with its interval."""
        ours, others = (
            self.seconds[name].reshape(len(self.seconds[name]), -1).mean(axis=1)
            for name in (policy, other)
        )
        return bootstrap_ratio(ours, others, seed=seed)

    def p99_ratio(self, policy: str, other: str) -> float:
        """99th percentile of one policy ÷ that of another."""
        ours, others = (np.quantile(self.seconds[name], 0.99) for name in (policy, other))
        return float(ours / others)

    def computing_ratio(self, policy: str, other: str) -> float:
        """Mean computing of the slowest device of one policy ÷ that of another."""
        return float(self.computing[policy].mean() / self.computing[other].mean())

    def gap(self) -> float:
        """What perfect balance would save of static placement's tokens on the fullest device."""
        return 1 - 1 / self.straggler["static"]

    def error_of_mean(self, policy: str) -> float:
        """Simulated ÷ taken mean layer time, less one."""
        counted = self.counted[policy]
        ours, simulated = self.seconds[policy][counted], self.simulated[policy][counted]
        return float(simulated.mean() / ours.mean() - 1)

    def median_error(self, policy: str) -> float:
        """Median of the errors of single layer-steps, without their signs."""
        counted = self.counted[policy]
        ours, simulated = self.seconds[policy][counted], self.simulated[policy][counted]
        return float(np.median(np.abs(simulated / ours - 1)))


def time_tables(times: Sequence[Times], *, seed: int) -> tuple[Table, ...]:
    """Layer times, ratios with their intervals, and errors of the simulator.

    Args:
        times: Workloads.
        seed: Of the intervals.
    """
    return (
        Table(
            name="layer_times",
            columns=_TIME_COLUMNS,
            rows=tuple(_time_rows(times)),
        ),
        Table(
            name="ratios",
            columns=("workload", "policy", "to", "mean_ratio", "low_95", "high_95", "p99_ratio"),
            rows=tuple(_ratio_rows(times, seed)),
        ),
        Table(
            name="layer_time_cdf",
            columns=("workload", "policy", "percentile", "layer_time_ms"),
            rows=tuple(_cdf_rows(times)),
        ),
        Table(
            name="simulator_error",
            columns=_ERROR_COLUMNS,
            rows=tuple(_error_rows(times)),
        ),
    )


def time_plots(times: Sequence[Times], how: str) -> tuple[Plot, ...]:
    """Distributions of layer times, and simulated against taken means.

    Args:
        times: Workloads.
        how: ``measured`` or ``emulated``.
    """
    rows = -(-len(times) // 2)
    return (
        Plot(
            name="layer_time_cdf",
            draw=lambda figure: _draw_cdf(figure, times, how),
            inches=(9, 3.2 * rows),
            caption=(
                f"Share of layer-steps whose {how} layer time is at most so long, one panel for "
                "each workload, one line for each policy."
            ),
        ),
        Plot(
            name="simulator_error",
            draw=lambda figure: _draw_error(figure, times, how),
            inches=(6, 5.5),
            caption=(
                f"Mean layer time as simulated against as {how}, one dot for each workload and "
                "policy; on the line the two are equal."
            ),
        ),
    )


def ratio_findings(
    times: Sequence[Times], *, seed: int, intervals: str, why: str
) -> tuple[Finding, ...]:
    """The default policy beside each other one, and beside the paper's figures.

    Args:
        times: Workloads.
        seed: Of the intervals.
        intervals: What they are over.
        why: How the setting is not the paper's.
    """
    found = []
    for other, paper in (("static", -43.19), ("eplb", -21.89), ("paper", None)):
        ratios = {each.name: each.ratio(DEFAULT, other, seed=seed) for each in times}
        cases = {
            each.name: f"{ratios[each.name].as_change()} over {intervals}, "
            f"p99 {100 * (each.p99_ratio(DEFAULT, other) - 1):+.1f}%"
            for each in times
        }
        faster = sum(ratio.high < 1 for ratio in ratios.values())
        slower = sum(ratio.low > 1 for ratio in ratios.values())
        ours = (
            f"{spread(ratio.value - 1 for ratio in ratios.values())}; {faster} faster and "
            f"{slower} slower beyond doubt"
        )
        what = f"mean layer time of the default policy against {LABELS[other]}"
        if paper is None:
            found.append(Finding(what=what, ours=ours, cases=cases))
            continue
        found.append(
            Finding(
                what=what,
                paper=f"{paper}%",
                ours=ours,
                cases=cases,
                why=f"{why}; {_bounds(times, other)}",
                verdict=_judge([100 * (ratio.value - 1) for ratio in ratios.values()], paper),
            )
        )
    return tuple(found)


def _bounds(times: Sequence[Times], other: str) -> str:
    """What there was to gain, and what of a layer's time is no computing."""
    gaps = [1 - 1 / each.straggler[other] for each in times]
    text = f"perfect balance of tokens would save {span(gaps, '.1%')} of its computing at best"
    rest = [1 - float(e.computing[other].mean() / e.seconds[other].mean()) for e in times]
    if max(rest) > 0.01:
        text += f", and {span(rest, '.0%')} of its layer time is not the slowest's computing"
    return text


def _judge(changes: Sequence[float], paper: float) -> Verdict:
    """Whether changes, in percent, are the paper's or better, give or take a few points."""
    reached = [change <= paper + _POINTS for change in changes]
    if all(reached):
        return "holds"
    return "in part" if any(reached) else "does not hold"


def error_finding(times: Sequence[Times], how: str) -> Finding:
    """The simulator's error, with the time model fitted to other steps.

    Args:
        times: Workloads.
        how: ``measured`` or ``emulated``.
    """
    parts = {}
    for each in times:
        errors = [each.error_of_mean(policy) for policy in each.seconds]
        medians = [each.median_error(policy) for policy in each.seconds]
        parts[each.name] = (
            f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f}% over policies; median of "
            f"single layer-steps {100 * float(np.median(medians)):.1f}%"
        )
    worst = max((each.error_of_mean(policy) for each in times for policy in each.seconds), key=abs)
    return Finding(
        what=f"error of simulated against {how} mean layer time, over policies",
        ours=f"at most {worst:+.1%}",
        cases=parts,
    )


def _time_rows(times: Sequence[Times]) -> Iterator[tuple[Any, ...]]:
    for each in times:
        for policy, seconds in each.seconds.items():
            p50, p99 = np.quantile(seconds, (0.5, 0.99))
            computing = each.computing[policy].mean()
            milliseconds = (1e3 * float(s) for s in (seconds.mean(), p50, p99, computing))
            yield (each.name, policy, seconds.size, *milliseconds, each.straggler[policy])


def _ratio_rows(times: Sequence[Times], seed: int) -> Iterator[tuple[Any, ...]]:
    for each in times:
        for policy in each.seconds:
            for other in ("static", "eplb"):
                if policy != other:
                    ratio = each.ratio(policy, other, seed=seed)
                    yield (each.name, policy, other, *ratio, each.p99_ratio(policy, other))


def _cdf_rows(times: Sequence[Times]) -> Iterator[tuple[Any, ...]]:
    for each in times:
        for policy, seconds in each.seconds.items():
            values = np.percentile(seconds, _PERCENTILES)
            for percentile, value in zip(_PERCENTILES, values, strict=True):
                yield (each.name, policy, percentile, 1e3 * float(value))


def _error_rows(times: Sequence[Times]) -> Iterator[tuple[Any, ...]]:
    for each in times:
        static = float(each.seconds["static"].mean()), float(each.simulated["static"].mean())
        for policy, seconds in each.seconds.items():
            means = float(seconds.mean()), float(each.simulated[policy].mean())
            yield (
                *(each.name, policy, 1e3 * means[0], 1e3 * means[1]),
                *(each.error_of_mean(policy), each.median_error(policy)),
                *(means[0] / static[0], means[1] / static[1]),
            )


def _draw_cdf(figure: "Figure", times: Sequence[Times], how: str) -> None:
    for panel, each in zip(grid(figure, len(times)), times, strict=True):
        for policy, seconds in each.seconds.items():
            values = 1e3 * np.sort(seconds.ravel())
            share = np.arange(1, len(values) + 1) / len(values)
            panel.plot(values, share, color=_COLOURS[policy], label=LABELS[policy])
        longest = max(float(np.quantile(s, 0.995)) for s in each.seconds.values())
        shortest = min(float(s.min()) for s in each.seconds.values())
        panel.set(title=each.name, ylabel="share of layer-steps", ylim=(0, 1))
        panel.set(xlabel=f"{how} layer time, ms", xlim=(0.95e3 * shortest, 1.05e3 * longest))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small", loc="lower right")


def _draw_error(figure: "Figure", times: Sequence[Times], how: str) -> None:
    axes = figure.subplots()
    markers = "osD^vP"
    ends: list[float] = []
    for marker, each in zip(markers, times, strict=False):
        for policy, seconds in each.seconds.items():
            point = 1e3 * float(seconds.mean()), 1e3 * float(each.simulated[policy].mean())
            ends += point
            axes.plot(*point, marker=marker, color=_COLOURS[policy], linestyle="none")
        axes.plot([], [], marker=marker, color="black", linestyle="none", label=each.name)
    for policy in times[0].seconds:
        axes.plot([], [], color=_COLOURS[policy], linewidth=4, label=LABELS[policy])
    ends = [0.8 * min(ends), 1.25 * max(ends)]
    axes.plot(ends, ends, color="black", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel=f"{how} mean layer time, ms")
    axes.set_ylabel("simulated mean layer time, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
