from importlib.metadata import EntryPoint

import pytest

from moeless.core.clock import SystemClock
from moeless.core.layer_cost import LayerCost
from moeless.errors import ConfigError
from moeless.policies import registry
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.policies.planners import PLANNERS
from moeless.policies.planners.paper import PaperPlanner
from moeless.policies.planners.static import StaticPlanner
from moeless.policies.predictors import PREDICTORS
from moeless.policies.splitters import SPLITTERS


def offer(monkeypatch, name, value):
    entry = EntryPoint(name=name, value=value, group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])


def test_every_built_in_policy_can_be_made_by_name():
    options = {
        "fixed": {"seconds": 1.0},
        "histogram": {"seconds": 1.0},
        "min_time": {"cost": LayerCost(token_s=1e-6)},
        "window": {"clock": SystemClock()},
    }
    for policies in (PREDICTORS, PLANNERS, SPLITTERS, KEEP_ALIVES):
        for name in policies.names():
            assert policies.create(name, **options.get(name, {})) is not None


def test_the_built_in_names_are_pinned():
    assert PREDICTORS.names() == ("ewma", "previous", "window")
    assert PLANNERS.names() == ("eplb", "even_split", "moeless", "paper", "static", "swift")
    assert SPLITTERS.names() == ("even", "min_time", "slots")
    assert KEEP_ALIVES.names() == ("fixed", "histogram")


def test_options_reach_the_constructor():
    assert isinstance(PLANNERS.create("paper", memory_factor=1.5), PaperPlanner)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown planner 'magic'; known are: eplb, even_split,"):
        PLANNERS.create("magic")


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ConfigError, match="cv_threshold, memory_factor"):
        PLANNERS.create("paper", threshold=0.1)


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match=r"keep_alive 'fixed'.*seconds"):
        KEEP_ALIVES.create("fixed")


def test_a_third_party_adds_a_policy_through_an_entry_point(monkeypatch):
    offer(monkeypatch, "planner.mine", "moeless.policies.planners.static:StaticPlanner")
    assert PLANNERS.names() == (
        "eplb",
        "even_split",
        "mine",
        "moeless",
        "paper",
        "static",
        "swift",
    )
    assert isinstance(PLANNERS.create("mine"), StaticPlanner)


def test_an_entry_point_of_another_kind_is_not_a_planner(monkeypatch):
    offer(monkeypatch, "predictor.mine", "moeless.policies.predictors.previous:PreviousPredictor")
    assert "mine" not in PLANNERS.names()
    assert "mine" in PREDICTORS.names()


def test_a_third_party_cannot_take_a_built_in_name(monkeypatch):
    offer(monkeypatch, "planner.static", "their_package:Planner")
    with pytest.raises(ConfigError, match="built in, but 'their_package:Planner' claims"):
        PLANNERS.create("static")


@pytest.mark.parametrize(
    "value", ["no_such_package_anywhere:Planner", "moeless.policies.planners.static:Missing"]
)
def test_a_broken_entry_point_is_reported_with_its_target(monkeypatch, value):
    offer(monkeypatch, "planner.broken", value)
    with pytest.raises(ConfigError, match=f"cannot import '{value}'"):
        PLANNERS.create("broken")
