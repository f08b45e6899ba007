import math

import pytest

from moeless.core.model import FunctionId
from moeless.errors import ConfigError
from moeless.policies.keep_alive.fixed import FixedKeepAlive

FUNCTION = FunctionId("m", 0, 0)


@pytest.mark.parametrize("seconds", [0.0, 2.5, math.inf])
def test_every_function_is_kept_for_the_same_time(seconds):
    rule = FixedKeepAlive(seconds)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == seconds
    assert rule.keep_s(FunctionId("m", 3, 1), idle_s=100.0) == seconds


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_duration_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="not a duration"):
        FixedKeepAlive(seconds)
