"""What a file of events says about the order of a run."""

import pytest

from moeless.core.events import (
    DemandTaken,
    EventsLost,
    InstanceEvicted,
    InstanceLoaded,
    LoadFailed,
    LoadTaken,
    PlanMade,
    SearchTaken,
    SupervisorWoken,
)
from moeless.core.model import FunctionId
from moeless.errors import TraceError
from moeless.simulator.recorded_host import RecordedHost
from moeless.simulator.recorded_times import RecordedTimes


def event(make, time_s, /, **fields):
    return make(time_s=time_s, model="m", **fields)


def woken(time_s, layer=0, cause="message"):
    return event(SupervisorWoken, time_s, cause=cause, step=1, layer=layer)


def load(time_s, layer=0):
    return event(LoadTaken, time_s, kind="actual", step=1, layer=layer, tokens=4.0)


def test_moments_have_the_position_that_the_supervisor_knew():
    planned = event(
        PlanMade, 2.5, step=1, layer=0, plan_s=0.1, started=0, retired=0, kept=1, replicas=1
    )
    demanded = event(DemandTaken, 4.0, layer=1, experts=(3,))
    times = RecordedTimes.of([woken(1.0), load(2.0), planned, woken(3.0, 1), demanded], {})
    assert [(moment.began_s, moment.layer) for moment in times.moments] == [
        (1.0, 0),
        (2.0, 0),
        (3.0, 1),
        (4.0, 1),
    ]


def test_the_last_thing_that_an_engine_told_is_known_as_such():
    silent, telling = woken(1.0, cause="loads"), woken(2.0, cause="loads")
    times = RecordedTimes.of([silent, telling, load(3.0), load(4.0), woken(5.0)], {})
    assert [moment.ends_loads for moment in times.moments] == [True, False, False, True, False]


def test_searches_belong_to_the_load_before_which_they_were_taken_up():
    searches = [event(SearchTaken, 2.1 + n / 10, layer=n, loads=5) for n in range(2)]
    times = RecordedTimes.of([woken(1.0), load(2.0), *searches, load(3.0)], {})
    assert [moment.searches for moment in times.moments] == [(), tuple(searches), ()]
    assert list(times.searches()) == searches


def test_a_run_with_a_failure_is_refused():
    failed = event(LoadFailed, 1.0, layer=0, expert=0, device=0, reason="disk on fire")
    with pytest.raises(TraceError, match="the recorded run had a failure: disk on fire"):
        RecordedTimes.of([failed], {})


def test_a_run_of_which_events_are_missing_is_refused():
    with pytest.raises(TraceError, match="3 events of the recorded run are missing"):
        RecordedTimes.of([woken(1.0), event(EventsLost, 1.5, count=3), load(2.0)], {})


def test_a_run_of_which_nothing_was_recorded_is_refused():
    with pytest.raises(TraceError, match="run with --events"):
        RecordedTimes.of([], {})


FUNCTION, OTHER = FunctionId("m", 0, 1), FunctionId("m", 0, 2)


def loaded(time_s, function=FUNCTION):
    return event(
        InstanceLoaded,
        time_s,
        layer=0,
        expert=function.expert,
        device=0,
        num_bytes=1,
        load_s=0.1,
        blocking=False,
    )


def evicted(time_s, reason="room"):
    return event(InstanceEvicted, time_s, layer=0, expert=1, device=0, reason=reason)


def test_a_device_ends_its_orders_in_the_order_in_which_it_got_them():
    host = RecordedHost(device=0)
    host.load(FUNCTION)
    host.evict(FUNCTION, reason="room")
    host.load(OTHER)
    host.end(FUNCTION, loaded(1.0))
    host.end(FUNCTION, evicted(2.0))
    host.end(OTHER, loaded(3.0, OTHER))


def test_an_order_that_was_not_next_is_an_error():
    host = RecordedHost(device=0)
    host.load(OTHER)
    host.load(FUNCTION)
    with pytest.raises(TraceError, match=r"device 0, 1\.0+ s: .* load expert 1 .* load expert 2"):
        host.end(FUNCTION, loaded(1.0))


def test_an_order_that_was_never_given_is_an_error():
    with pytest.raises(TraceError, match="the replay's was none"):
        RecordedHost(device=0).end(FUNCTION, loaded(1.0))


def test_an_eviction_for_another_reason_is_an_error():
    host = RecordedHost(device=0)
    host.evict(FUNCTION, reason="released")
    with pytest.raises(TraceError, match=r"\(room\), the replay's was to evict .* \(released\)"):
        host.end(FUNCTION, evicted(1.0))


def test_an_instance_may_be_missed_from_the_order_to_evict_it_until_it_is_back():
    host = RecordedHost(device=0)
    assert not host.may_have_missed(FUNCTION, from_s=0.0, until_s=9.0)
    host.now_s = 5.0
    host.evict(FUNCTION, reason="room")
    host.end(FUNCTION, evicted(6.0))
    assert not host.may_have_missed(FUNCTION, from_s=1.0, until_s=5.0)
    assert host.may_have_missed(FUNCTION, from_s=1.0, until_s=5.1)
    assert host.may_have_missed(FUNCTION, from_s=70.0, until_s=71.0)
    host.load(FUNCTION)
    host.end(FUNCTION, loaded(8.0))
    assert host.may_have_missed(FUNCTION, from_s=7.0, until_s=9.0)
    assert not host.may_have_missed(FUNCTION, from_s=8.0, until_s=9.0)
