"""Failures reach the log, and do not flood it."""

import logging

from moeless.core.clock import ManualClock
from moeless.core.events import InstanceEvicted, LoadFailed, PlanFailed
from moeless.telemetry.log import FailureLog


def plan_failed(reason="no room"):
    return PlanFailed(time_s=0.0, model="m", step=1, layer=2, reason=reason)


def test_a_failed_plan_and_a_failed_load_are_each_logged_once_in_a_while(caplog):
    clock = ManualClock()
    log = FailureLog(clock, every_s=10.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.emit(plan_failed())
        log.emit(LoadFailed(time_s=0.0, model="m", layer=3, expert=1, device=0, reason="gone"))
        clock.advance(10.0)
        log.emit(plan_failed("still no room"))
    assert [record.getMessage() for record in caplog.records] == [
        "plan of m, layer 2, failed: no room",
        "load of m, layer 3, failed: gone",
        "plan of m, layer 2, failed: still no room (and 4 more)",
    ]


def test_ordinary_events_are_not_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        FailureLog(ManualClock()).emit(
            InstanceEvicted(time_s=0.0, model="m", layer=0, expert=0, device=0, reason="room")
        )
    assert caplog.records == []
