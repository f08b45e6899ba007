import contextlib
import json
import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

from moeless.core.events import EventsLost, InstanceLoaded, ReplicasChanged, WorkerLost
from moeless.errors import ConfigError
from moeless.telemetry.fanout import FanoutSink
from moeless.telemetry.jsonl import JsonlSink, read_events
from moeless.telemetry.memory import MemorySink

LOST = WorkerLost(time_s=1.5, model="m", device=0, reason="killed")
LOADED = InstanceLoaded(
    time_s=2.0, model="m", layer=1, expert=2, device=0, num_bytes=10, load_s=0.1, blocking=True
)


def test_memory_keeps_events_in_order_and_by_type():
    sink = MemorySink()
    sink.emit(LOST)
    sink.emit(LOADED)
    assert sink.events == (LOST, LOADED)
    assert sink.of(InstanceLoaded) == (LOADED,)


def test_memory_with_a_limit_forgets_the_oldest():
    sink = MemorySink(limit=1)
    sink.emit(LOST)
    sink.emit(LOADED)
    assert sink.events == (LOADED,)


def test_jsonl_writes_one_typed_object_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(LOST)
    sink.emit(LOADED)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "event": "WorkerLost",
        "time_s": 1.5,
        "model": "m",
        "device": 0,
        "reason": "killed",
    }
    assert second["event"] == "InstanceLoaded"
    sink.close()


def test_jsonl_appends_and_makes_an_existing_file_private(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "Old"}\n')
    path.chmod(0o644)
    sink = JsonlSink(path)
    sink.emit(LOST)
    sink.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().splitlines()) == 2


def test_jsonl_counts_events_after_its_end_instead_of_raising(tmp_path):
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.close()
    sink.close()
    sink.emit(LOST)
    assert sink.lost == 1


def test_jsonl_writes_numpy_numbers_as_numbers(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(WorkerLost(time_s=np.float64(1.0), model="m", device=np.int64(3), reason="gone"))
    sink.close()
    assert json.loads(path.read_text())["device"] == 3


def test_jsonl_names_the_file_that_it_cannot_open(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write events to .*missing"):
        JsonlSink(tmp_path / "missing" / "events.jsonl")


class BrokenSink:
    def emit(self, event):
        raise RuntimeError("broken")


def test_fanout_reaches_all_sinks_past_a_broken_one():
    first, last = MemorySink(), MemorySink()
    sink = FanoutSink(first, BrokenSink(), last)
    sink.emit(LOST)
    assert first.events == last.events == (LOST,)
    assert sink.failures == 1


def test_events_are_read_back_as_they_were_emitted(tmp_path):
    path = tmp_path / "events.jsonl"
    changed = ReplicasChanged(time_s=3.0, model="m", step=1, layer=0, devices_E=((0,), (0, 1)))
    sink = JsonlSink(path)
    for event in (LOST, LOADED, changed):
        sink.emit(event)
    sink.close()
    assert read_events(path) == [LOST, LOADED, changed]


def test_events_of_others_and_an_unfinished_line_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    lost = '{"event": "WorkerLost", "time_s": 1.5, "model": "m", "device": 0, "reason": "killed"}'
    path.write_text(f'{{"event": "TheirOwn", "x": 1}}\n{lost}\n{lost[:20]}')
    assert read_events(path) == [LOST]


@contextlib.contextmanager
def full_disk(path, room):
    """Files cannot grow beyond what this one has and ``room`` bytes more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size + room
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def said(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("room", [0, 1, 30, 150])
def test_events_that_a_full_disk_takes_are_counted_told_once_and_marked_where_they_are_missing(
    tmp_path, caplog, room
):
    path = tmp_path / "events.jsonl"
    sink = FanoutSink(JsonlSink(path), MemorySink())
    sink.emit(LOST)
    with full_disk(path, room):
        for _ in range(5):
            sink.emit(LOADED)
        lost = sink.lost
        assert lost >= 4
        whole = [LOST] + [LOADED] * (5 - lost)
        assert read_events(path) == whole, "no line is torn"
        assert path.read_bytes().endswith(b"\n")
    sink.emit(LOST)
    sink.emit(LOADED)
    mark = EventsLost(time_s=LOADED.time_s, model=LOADED.model, count=lost)
    assert read_events(path) == [*whole, mark, LOST, LOADED]
    assert sink.lost == lost
    (first, began), (second, over) = said(caplog)
    assert (first, second) == ("ERROR", "WARNING")
    assert "File too large" in began
    assert f"again; {lost} are lost" in over


def test_each_gap_has_a_mark_of_its_own_also_one_that_lasts_until_the_end(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    for count in (2, 3):
        sink.emit(LOST)
        with full_disk(path, 0):
            for _ in range(count):
                sink.emit(LOADED)
    sink.close()
    marks = [event.count for event in read_events(path) if isinstance(event, EventsLost)]
    assert marks == [2, 3]
    assert sink.lost == 5


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"event": "WorkerLost"}', "3"])
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"events.jsonl, line 1: not an event"):
        read_events(path)


def test_a_missing_file_of_events_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: cannot be read"):
        read_events(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("text", ["root:x:0:0\n", '{"other": 1}\n', "{"])
def test_a_file_of_something_else_gets_no_events_and_keeps_its_mode(tmp_path, text):
    path = tmp_path / "passwd"
    path.write_text(text)
    path.chmod(0o644)
    if text == "{":
        JsonlSink(path).close()  # the first line was being written
        return
    with pytest.raises(ConfigError, match=r"passwd: it holds something else; name another file"):
        JsonlSink(path)
    assert path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_events_may_go_to_a_device_which_keeps_its_mode(monkeypatch):
    before = Path(os.devnull).stat().st_mode
    monkeypatch.setattr(os, "fchmod", lambda *_: pytest.fail("the mode of a device is not ours"))
    sink = JsonlSink(Path(os.devnull))
    sink.emit(WorkerLost(time_s=1.0, model="m", device=0, reason="killed"))
    sink.close()
    assert Path(os.devnull).stat().st_mode == before
    assert sink.lost == 0
