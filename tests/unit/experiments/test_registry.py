import importlib

import pytest

from moeless.errors import ConfigError
from moeless_experiments.registry import MODULES, find, select


@pytest.mark.parametrize("name", ["fig06", "fig6", "Figure 6", "FIG. 06", "figure-6"])
def test_a_figure_is_found_by_every_way_of_writing_it(name):
    assert select([name]) == ["fig06"]


def test_all_means_every_experiment_in_order():
    assert select(["all"]) == list(MODULES)


def test_what_is_named_twice_runs_once():
    assert select(["fig06", "fig6"]) == ["fig06"]


def test_an_unknown_figure_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"no experiment 'fig99'; use .*fig06.*all"):
        select(["fig06", "fig99"])


@pytest.mark.parametrize("name", list(MODULES))
def test_every_experiment_says_what_it_is(name):
    pytest.importorskip("torch")
    experiment = find(name)
    assert importlib.import_module(MODULES[name]).__doc__
    assert experiment.title
    assert experiment.claim.endswith((".", "?"))
