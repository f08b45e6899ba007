"""One setting varied over workloads and systems: rows, lines, and what they say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.figure import Plot, Table, Verdict
from moeless_experiments.plotting import grid
from moeless_experiments.studies.comparison import COLOURS, NAMES
from moeless_experiments.studies.replay_traces import Workload
from moeless_experiments.studies.replays import ACCOUNTINGS, HARDWARE, Case, Outcome, replay_all


class Line(NamedTuple):
    """One system on one workload and machine.

    Args:
        workload: What is replayed.
        policy: By name.
        hardware: Time model by name.
    """

    workload: Workload
    policy: str
    hardware: str


Metric = Callable[[Outcome], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Swept:
    """What came out of a sweep.

    Args:
        setting: What was varied, with its unit.
        values: Its values.
        found: Outcomes of each line, one per value.
        cases: What they came from.
    """

    setting: str
    values: tuple[float, ...]
    found: dict[Line, list[Outcome]]
    cases: dict[Line, list[Case]]

    def series(self, line: Line, metric: Metric) -> list[float]:
        """A figure of each value."""
        return [metric(outcome) for outcome in self.found[line]]

    def lines(self, policy: str) -> list[Line]:
        """Lines of a system."""
        return [line for line in self.found if line.policy == policy]

    def changes(self, policy: str, metric: Metric) -> dict[Line, float]:
        """A figure at the last value ÷ at the first one, minus 1, by line."""
        found = {}
        for line in self.lines(policy):
            series = self.series(line, metric)
            found[line] = series[-1] / series[0] - 1.0
        return found

    def against(self, policy: str, other: str, metric: Metric) -> dict[Line, list[float]]:
        """A system's figure ÷ another's at each value, minus 1."""
        return {
            line: [
                ours / theirs - 1.0
                for ours, theirs in zip(
                    self.series(line, metric),
                    self.series(line._replace(policy=other), metric),
                    strict=True,
                )
            ]
            for line in self.lines(policy)
        }

    def table(self, name: str = "sweep") -> Table:
        """A row for each line and value."""
        columns = (
            "workload",
            "devices",
            "system",
            self.setting,
            "prediction",
            "layer_time_mean_ms",
            "layer_time_p99_ms",
            "straggler_ratio_mean",
            "bound_ratio_mean",
            "replicas_per_layer",
            "cold_starts_per_layer_step",
            "blocking_loads_per_layer_step",
            *(f"cost_{each}_gb_s" for each in ACCOUNTINGS),
        )
        rows = tuple(
            (
                line.workload.label,
                HARDWARE[line.hardware],
                NAMES[line.policy],
                value,
                self.cases[line][place].prediction,
                outcome.mean_ms,
                outcome.p99_ms,
                outcome.straggler_ratio,
                outcome.figures["bound_ratio"]["mean"],
                outcome.replicas,
                outcome.figures["cold_starts_per_layer_step"],
                outcome.figures["blocking_loads_per_layer_step"],
                *(outcome.cost[each] for each in ACCOUNTINGS),
            )
            for line, outcomes in self.found.items()
            for place, (value, outcome) in enumerate(zip(self.values, outcomes, strict=True))
        )
        return Table(name=name, columns=columns, rows=rows)

    def plot(self, metric: Metric, label: str, *, log: bool = False, base: str = "") -> Plot:
        """Lines over the setting, a panel for each workload and machine.

        Args:
            metric: What is drawn.
            label: Its name.
            log: Whether the setting's axis is logarithmic.
            base: A system that all are divided by.
        """
        return Plot(
            name="sweep",
            draw=lambda figure: self._draw(figure, metric, label, log=log, base=base),
            inches=(11, 3.2 * -(-len(self._panels()) // 3)),
            caption=f"{label} over {self.setting.replace('_', ' ')}; a panel for each workload "
            "and machine.",
        )

    def _panels(self) -> list[tuple[Workload, str]]:
        return list(dict.fromkeys((line.workload, line.hardware) for line in self.found))

    def _draw(self, figure: Any, metric: Metric, label: str, *, log: bool, base: str) -> None:
        panels = self._panels()
        for panel, (workload, hardware) in zip(
            grid(figure, len(panels), columns=3), panels, strict=True
        ):
            for line in self.found:
                if (line.workload, line.hardware) != (workload, hardware):
                    continue
                values = np.array(self.series(line, metric))
                if base:
                    values = values / self.series(line._replace(policy=base), metric)
                colour = COLOURS[line.policy]
                panel.plot(self.values, values, ".-", color=colour, label=NAMES[line.policy])
            if log:
                panel.set_xscale("log")
            panel.set_title(f"{workload.label}\n{HARDWARE[hardware]}", fontsize="x-small")
            panel.set(xlabel=self.setting.replace("_", " "), ylabel=label)
            panel.grid(alpha=0.3)
            panel.legend(fontsize="xx-small")


def sweep(
    context: Context,
    setting: str,
    values: Sequence[float],
    lines: Sequence[Line],
    vary: Callable[[Case, float], Case],
) -> Swept:
    """Replay every line at every value.

    Args:
        context: The run.
        setting: What is varied, with its unit.
        values: Its values.
        lines: Systems, workloads and machines.
        vary: Puts a value into a case.
    """
    cases = {
        line: [vary(Case(line.workload, line.policy, line.hardware), value) for value in values]
        for line in lines
    }
    done = replay_all(context, [case for each in cases.values() for case in each])
    return Swept(
        setting=setting,
        values=tuple(values),
        found={line: [done[case] for case in each] for line, each in cases.items()},
        cases=cases,
    )


def lines_of(
    workloads: Sequence[Workload], policies: Sequence[str], machines: Sequence[str]
) -> list[Line]:
    """All combinations."""
    return [Line(load, name, each) for load in workloads for each in machines for name in policies]


def listed(changes: dict[Line, float]) -> dict[str, str]:
    """Percentages by line, for a finding."""
    return {
        f"{line.workload.label}, {HARDWARE[line.hardware]}": f"{value:+.2%}"
        for line, value in changes.items()
    }


def verdict(held: Sequence[bool]) -> Verdict:
    """Of a claim that should hold everywhere."""
    return "holds" if all(held) else "in part" if any(held) else "does not hold"


def mean_ms(outcome: Outcome) -> float:
    """Mean layer time."""
    return outcome.mean_ms


def replicas(outcome: Outcome) -> float:
    """Mean replicas of a layer."""
    return outcome.replicas


def memory_factor(outcome: Outcome) -> float:
    """Mean replicas of an expert."""
    return float(outcome.figures["memory_factor"])


def straggler_ratio(outcome: Outcome) -> float:
    """Mean straggler ratio."""
    return outcome.straggler_ratio


def cold_starts(outcome: Outcome) -> float:
    """Loads per layer-step."""
    return float(outcome.figures["cold_starts_per_layer_step"])


def blocking_loads(outcome: Outcome) -> float:
    """Loads per layer-step that tokens wait for."""
    return float(outcome.figures["blocking_loads_per_layer_step"])


def resident(outcome: Outcome) -> float:
    """GB·s on devices."""
    return outcome.cost["resident"]
