"""Which experiments there are, in the order in which ``all`` runs them."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from moeless.errors import ConfigError
from moeless_experiments.figure import Experiment

ALL: Final = "all"

MODULES: Final[dict[str, str]] = {
    "fig01": "moeless_experiments.figures.fig01",
    "fig03": "moeless_experiments.figures.fig03",
    "fig04": "moeless_experiments.figures.fig04",
    "fig06": "moeless_experiments.figures.fig06",
    "fig07": "moeless_experiments.figures.fig07",
    "fig08": "moeless_experiments.figures.fig08",
    "fig09": "moeless_experiments.figures.fig09",
    "fig10": "moeless_experiments.figures.fig10",
    "fig11": "moeless_experiments.figures.fig11",
    "fig12": "moeless_experiments.figures.fig12",
    "fig13": "moeless_experiments.figures.fig13",
    "fig14": "moeless_experiments.figures.fig14",
    "fig15": "moeless_experiments.figures.fig15",
    "fig16": "moeless_experiments.figures.fig16",
    "fig17": "moeless_experiments.figures.fig17",
    "table1": "moeless_experiments.figures.table1",
    "table2": "moeless_experiments.figures.table2",
    "overheads": "moeless_experiments.figures.overheads",
    "skew": "moeless_experiments.figures.skew",
    "memory": "moeless_experiments.figures.memory",
    "pauses": "moeless_experiments.figures.pauses",
    "sensitivity": "moeless_experiments.figures.sensitivity",
    "where-it-pays": "moeless_experiments.figures.where_it_pays",
    "predictors": "moeless_experiments.figures.predictors",
    "learning-curve": "moeless_experiments.figures.learning_curve",
    "end-effect": "moeless_experiments.figures.end_effect",
    "measured-layers": "moeless_experiments.figures.measured_layers",
    "emulated-devices": "moeless_experiments.figures.emulated_devices",
}
"""Experiment to the module with its ``EXPERIMENT``; imported when it is run."""


def select(names: Sequence[str]) -> list[str]:
    """Ids of experiments, in the registry's order, none twice.

    Args:
        names: Ids, ``all``, or spellings such as ``fig7`` and ``Figure 7``.

    Raises:
        ConfigError: One of them is not known; the message lists those that are.
    """
    wanted = set()
    for name in names:
        found = _normalise(name)
        if found != ALL and found not in MODULES:
            raise ConfigError(
                f"there is no experiment {name!r}; use {', '.join(MODULES)}, or {ALL}"
            )
        wanted |= set(MODULES) if found == ALL else {found}
    return [name for name in MODULES if name in wanted]


def find(name: str) -> Experiment:
    """The experiment of an id."""
    experiment = import_module(MODULES[name]).EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert experiment.id == name
    return experiment


def _normalise(name: str) -> str:
    text = name.strip().lower()
    figure = re.fullmatch(r"fig(?:ure)?\.?[ _-]*0*(\d+)", text)
    if figure is not None:
        return f"fig{int(figure[1]):02d}"
    table = re.fullmatch(r"tab(?:le)?\.?[ _-]*0*(\d+)", text)
    return text if table is None else f"table{int(table[1])}"
