"""A recorder counts what a step computed, and nothing else."""

import threading

import numpy as np
import pytest

from moeless.errors import TraceError
from moeless.workloads.recording import spool as spool_module
from moeless.workloads.recording.ledgers import RequestLedger, RoutedShape, StepLedger
from moeless.workloads.recording.recorder import RoutingRecorder
from moeless.workloads.recording.spool import Spool
from moeless.workloads.routing_trace import read_trace, write_trace

SHAPE = RoutedShape(num_layers=3, num_experts=5, top_k=2)
LEDGERS = {"steps": StepLedger, "requests": RequestLedger}


@pytest.fixture
def make_recorder(tmp_path):
    made = []

    def make(unit="steps", *, topk_ids=True):
        made.append(
            RoutingRecorder(SHAPE, LEDGERS[unit](SHAPE, topk_ids=topk_ids, folder=tmp_path))
        )
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()
    assert list(tmp_path.glob("*")) == [], "a temporary file was left behind"


@pytest.fixture
def random():
    return np.random.default_rng(5)


def draw_ids(random, tokens):
    """Experts of every token, [T, L, K]."""
    ranks = random.random((tokens, SHAPE.num_layers, SHAPE.num_experts))
    return np.argsort(ranks, axis=2)[:, :, : SHAPE.top_k]


def show(recorder, ids_TLK):
    """What the layers of one forward report."""
    for layer in range(SHAPE.num_layers):
        recorder.observe(layer, ids_TLK[:, layer])


def record(recorder, parts, ids_TLK, at_s=0.0):
    recorder.begin_step(parts, at_s)
    show(recorder, ids_TLK)
    recorder.keep_step()


def finished_trace(recorder, unit="steps"):
    recorder.stop()
    return recorder.trace(
        model="m", layer_ids=(1, 2, 5), unit=unit, group="here", source="a test", licence="none"
    )


def count(ids_TLK):
    return np.stack(
        [np.bincount(ids.ravel(), minlength=SHAPE.num_experts) for ids in ids_TLK.swapaxes(0, 1)]
    )


def test_a_step_has_the_tokens_of_its_forward_and_counts_those_that_were_decoded(
    make_recorder, random
):
    recorder = make_recorder()
    first, second = draw_ids(random, 7), draw_ids(random, 4)
    record(recorder, [("a", "prefill", 4), ("b", "prefill", 3)], first, at_s=10.5)
    record(recorder, [("c", "prefill", 2), ("a", "decode", 1), ("b", "decode", 1)], second, 11.0)
    trace = finished_trace(recorder)
    assert trace.loads_NLE.tolist() == [count(first).tolist(), count(second).tolist()]
    assert trace.tokens_N.tolist() == [7, 4]
    assert trace.decode_tokens_N.tolist() == [0, 2]
    assert trace.time_s_N.tolist() == [0.0, 0.5]
    assert trace.topk_ids_TLK.tolist() == np.concatenate([first, second]).tolist()
    assert trace.topk_offsets.tolist() == [0, 7, 11]
    assert trace.group_N.tolist() == ["here", "here"]
    assert (trace.meta.phase, trace.meta.layer_ids) == ("mixed", (1, 2, 5))


def test_a_request_has_the_tokens_of_all_its_steps(make_recorder, random):
    recorder = make_recorder("requests")
    ids = {"b": draw_ids(random, 6), "a": draw_ids(random, 4), "open": draw_ids(random, 2)}
    record(recorder, [("b", "prefill", 3)], ids["b"][:3])
    packed = np.concatenate([ids["a"][:2], ids["open"]])
    record(recorder, [("a", "prefill", 2), ("open", "prefill", 2)], packed)
    for t in range(2):
        both = np.stack([ids["a"][2 + t], ids["b"][3 + t]])
        record(recorder, [("a", "decode", 1), ("b", "decode", 1)], both)
    recorder.finish("a")
    record(recorder, [("b", "decode", 1)], ids["b"][5:])
    recorder.finish("b")
    recorder.finish("never ran")
    assert len(recorder) == 2
    trace = finished_trace(recorder, "requests")
    # In the order in which they began, whichever ended first; what is not complete is left out.
    assert trace.loads_NLE.tolist() == [count(ids["b"]).tolist(), count(ids["a"]).tolist()]
    assert trace.tokens_N.tolist() == [6, 4]
    assert trace.decode_tokens_N.tolist() == [3, 2]
    assert trace.topk_ids_TLK.tolist() == np.concatenate([ids["b"], ids["a"]]).tolist()
    assert trace.time_s_N is None


def test_forwards_outside_a_step_are_not_counted(make_recorder, random):
    recorder = make_recorder()
    ids = draw_ids(random, 3)
    show(recorder, draw_ids(random, 9))  # warm-up, before the first step
    record(recorder, [("a", "prefill", 3)], ids)
    show(recorder, draw_ids(random, 1))  # a probe, between steps
    recorder.keep_step()
    assert finished_trace(recorder).loads_NLE.tolist() == [count(ids).tolist()]


def test_a_step_that_failed_and_was_tried_again_counts_once(make_recorder, random):
    recorder = make_recorder()
    ids = draw_ids(random, 2)
    parts = [("a", "decode", 1), ("b", "decode", 1)]
    recorder.begin_step(parts, 1.0)
    recorder.observe(0, ids[:, 0])
    recorder.begin_step(parts, 2.0)  # failed; now each row alone
    show(recorder, ids[:1])
    show(recorder, ids[1:])
    recorder.keep_step()
    trace = finished_trace(recorder)
    assert trace.topk_ids_TLK.tolist() == ids.tolist()
    assert trace.meta.phase == "decode"


@pytest.mark.parametrize("rows", [[4, 4, 4], [3, 4, 3], [3, 3, 2], [3, 3, 0]])
def test_padding_or_a_skipped_layer_ends_the_recording(make_recorder, random, rows):
    recorder = make_recorder()
    good = draw_ids(random, 2)
    record(recorder, [("a", "prefill", 2)], good)
    recorder.begin_step([("b", "prefill", 3)], 1.0)
    ids = draw_ids(random, 4)
    for layer, seen in enumerate(rows):
        recorder.observe(layer, ids[:seen, layer])
    recorder.keep_step()
    assert isinstance(recorder.failure, TraceError)
    layer = next(i for i, seen in enumerate(rows) if seen != 3)
    assert f"MoE layer {layer} routed {rows[layer]} tokens" in str(recorder.failure)
    record(recorder, [("c", "prefill", 2)], good)
    assert finished_trace(recorder).tokens_N.tolist() == [2], "nothing is taken after a failure"


def test_nothing_is_taken_after_the_end(make_recorder, random):
    recorder = make_recorder()
    record(recorder, [("a", "prefill", 2)], draw_ids(random, 2))
    recorder.begin_step([("a", "decode", 1)], 1.0)
    recorder.stop()
    show(recorder, draw_ids(random, 1))
    recorder.keep_step()
    trace = finished_trace(recorder)
    assert trace.tokens_N.tolist() == [2]
    assert trace.meta.phase == "prefill"


def test_nothing_recorded_is_no_trace(make_recorder):
    with pytest.raises(TraceError, match="at least one"):
        finished_trace(make_recorder())
    with pytest.raises(TraceError, match="at least one"):
        finished_trace(make_recorder("requests"), "requests")


@pytest.mark.parametrize("unit", LEDGERS)
def test_a_full_disk_ends_the_recording_and_keeps_what_was_whole(
    make_recorder, random, unit, monkeypatch
):
    recorder = make_recorder(unit)
    record(recorder, [("a", "prefill", 2)], draw_ids(random, 2))
    recorder.finish("a")
    append = Spool.append

    def append_until_full(self, rows):
        if rows.dtype == np.int16:  # the loads of the step are written, its ids are not
            raise OSError(28, "No space left on device")
        append(self, rows)

    monkeypatch.setattr(Spool, "append", append_until_full)
    record(recorder, [("b", "prefill", 3)], draw_ids(random, 3))
    monkeypatch.undo()
    assert "No space left on device" in str(recorder.failure)
    assert finished_trace(recorder, unit).tokens_N.tolist() == [2]


def test_the_trace_outlives_its_recorder_and_can_be_written(make_recorder, random, tmp_path):
    recorder = make_recorder()
    ids = draw_ids(random, 5)
    record(recorder, [("a", "prefill", 5)], ids)
    trace = finished_trace(recorder)
    recorder.close()
    write_trace(trace, tmp_path / "trace.npz")
    assert read_trace(tmp_path / "trace.npz").topk_ids_TLK.tolist() == ids.tolist()
    (tmp_path / "trace.npz").unlink()


def test_requests_that_end_while_steps_go_on_lose_nothing(make_recorder, random):
    recorder = make_recorder("requests", topk_ids=False)
    ids = draw_ids(random, 200)
    begun = threading.Semaphore(0)

    def run_steps():
        for t in range(200):
            record(recorder, [(f"r{t}", "prefill", 1)], ids[t : t + 1])
            begun.release()

    thread = threading.Thread(target=run_steps)
    thread.start()
    for t in range(200):
        begun.acquire()
        recorder.finish(f"r{t}")
    thread.join()
    trace = finished_trace(recorder, "requests")
    assert trace.loads_NLE.tolist() == [count(ids[t : t + 1]).tolist() for t in range(200)]


def test_rows_come_back_from_a_spool_in_any_order(tmp_path, random, monkeypatch):
    monkeypatch.setattr(spool_module, "_GATHER_BYTES", 64)  # several rounds
    rows = random.integers(0, 1000, (50, 2, 3)).astype(np.int16)
    spool = Spool((2, 3), np.int16, tmp_path)
    for first in range(0, 50, 7):
        spool.append(rows[first : first + 7])
    order = random.permutation(50)[:33]
    assert len(spool) == 50
    assert spool.read().tolist() == rows.tolist()
    assert spool.read_in_order(order).tolist() == rows[order].tolist()
    assert spool.read_in_order(order[:0]).shape == (0, 2, 3)
    spool.close()
