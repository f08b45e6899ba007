"""The supervisor looks soon again while one engine may be in another's way."""

import selectors
from types import SimpleNamespace

import pytest

from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.engines import Engines


@pytest.mark.parametrize(
    ("num_engines", "waits", "looks"),
    [(2, True, True), (2, False, False), (1, True, False), (0, False, False)],
)
def test_only_where_tokens_wait_and_somebody_else_may_leave_a_layer(num_engines, waits, looks):
    with selectors.DefaultSelector() as selector:
        engines = Engines(
            SupervisorConfig(workers=()),
            platform=SimpleNamespace(has_demands=waits, models={}),
            selector=selector,
            make_controller=None,
        )
        engines._joined.update(dict.fromkeys(range(num_engines)))
        assert engines.may_be_in_the_way is looks
