"""What is recorded is where the routers of unmodified transformers send the same tokens."""

import os
import signal

import numpy as np
import pytest

from moeless.bootstrap.recording.record import record_routing
from moeless.bootstrap.recording.record_config import RecordConfig
from moeless.engines.transformers.generation.model_runner import ModelRunner
from moeless.engines.transformers.generation.sampler import RowSampler
from moeless.errors import EngineError, TraceError
from moeless.functions.token_path.dispatch import ExpertDispatcher
from moeless.workloads.recording.recorder import RoutingRecorder
from moeless.workloads.routing_trace import read_trace

CHUNK, MAX_TOKENS = 16, 9
FAMILIES = ["mixtral", "deepseek_v3", "gpt_oss", "llama4"]


@pytest.fixture
def record(configure, prompts_file, tmp_path):
    """Record the prompts; returns the trace and the report."""

    def record(reference, *, concurrency, devices=1, on_progress=lambda _: None, **options):
        engine, experts = configure(reference.directory, concurrency=concurrency, devices=devices)
        config = RecordConfig(
            prompts=str(prompts_file),
            out=tmp_path / "trace.npz",
            max_tokens=MAX_TOKENS,
            **options,
        )
        report = record_routing(engine, experts, config, on_progress=on_progress)
        return read_trace(config.out), report

    return record


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_has_the_choices_of_the_routers(family, reference_of, record):
    reference = reference_of(family)
    trace, report = record(reference, concurrency=3, devices=2, unit="requests", topk_ids=True)
    # Prompt and answer without its last token, and no row of padding, in any batch.
    assert trace.tokens_N.tolist() == [len(ids) for ids in reference.ids]
    answered = trace.tokens_N - np.array(reference.prompt_tokens)
    assert trace.decode_tokens_N.tolist() == answered.tolist()
    assert trace.loads_NLE.tolist() == [reference.count(ids).tolist() for ids in reference.ids]
    assert np.sort(trace.topk_ids_TLK, axis=2).tolist() == np.concatenate(reference.ids).tolist()
    alone = sum(-(-prompt // CHUNK) for prompt in reference.prompt_tokens)
    assert report.steps < alone + answered.sum(), "no two prompts shared a step"
    assert report.tokens == trace.tokens_N.sum()
    assert report.decode_tokens == answered.sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_follow_prefill_chunks_and_single_tokens(family, reference_of, record):
    reference = reference_of(family)
    trace, _ = record(reference, concurrency=1)
    expected = []
    for ids, prompt in zip(reference.ids, reference.prompt_tokens, strict=True):
        chunks = [ids[a : min(a + CHUNK, prompt)] for a in range(0, prompt, CHUNK)]
        expected += [(chunk, 0) for chunk in chunks]
        expected += [(ids[t : t + 1], 1) for t in range(prompt, len(ids))]
    assert max(reference.prompt_tokens) > 2 * CHUNK, "no prompt takes several chunks"
    assert trace.tokens_N.tolist() == [len(ids) for ids, _ in expected]
    assert trace.decode_tokens_N.tolist() == [decoded for _, decoded in expected]
    assert trace.loads_NLE.tolist() == [reference.count(ids).tolist() for ids, _ in expected]
    assert trace.time_s_N[0] == 0
    assert (np.diff(trace.time_s_N) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_prompts_that_run_together_hold_all_their_tokens(family, reference_of, record):
    reference = reference_of(family)
    trace, report = record(reference, concurrency=4, topk_ids=True, seed=3)
    total_LE = sum(reference.count(ids) for ids in reference.ids)
    assert trace.loads_NLE.sum(axis=0, dtype=np.int64).tolist() == total_LE.tolist()
    decoding = trace.decode_tokens_N > 0
    # Prompts and decoded tokens never share a step of this engine, and rows do share steps.
    assert (trace.decode_tokens_N[decoding] == trace.tokens_N[decoding]).all()
    assert trace.decode_tokens_N.max() > 1
    assert len(trace) == report.entries == report.steps
    assert report.feed.finished == len(reference.ids)


def test_the_settings_are_written_but_no_path(reference_of, record):
    reference = reference_of("mixtral")
    trace, _ = record(reference, concurrency=2, unit="requests", limit=3, licence="CC0-1.0")
    assert trace.meta.phase == "mixed"
    recorded = trace.meta.extra["recorded"]
    assert recorded["prompts"] == "prompts.txt"
    assert (recorded["limit"], recorded["max_tokens"], recorded["seed"]) == (3, MAX_TOKENS, None)
    assert recorded["dtype"] == "float32"
    assert set(recorded["versions"]) == {"moeless", "torch", "transformers", "numpy"}
    assert trace.meta.licence == "CC0-1.0"
    assert set(trace.group_N) == {"prompts.txt"}
    assert str(reference.directory.parent) not in trace.meta.to_json(), "a path got out"


def test_a_seed_shuffles_the_prompts_before_the_limit(reference_of, record):
    reference = reference_of("mixtral")
    trace, _ = record(reference, concurrency=1, unit="requests", limit=4, seed=1)
    order = np.random.default_rng(1).permutation(len(reference.ids))[:4]
    assert sorted(order) != order.tolist()
    assert trace.tokens_N.tolist() == [len(reference.ids[i]) for i in order]


def test_a_batch_that_failed_and_was_repeated_row_by_row_counts_once(
    reference_of, record, monkeypatch
):
    """The rows of the failed forward went through every layer before it failed."""
    reference = reference_of("gpt_oss")
    forward, failed = ModelRunner._forward, []

    def fail_once(self, phase, cache, tokens):
        logits = forward(self, phase, cache, tokens)
        if phase == "decode" and len(tokens) > 1 and not failed:
            failed.append(len(tokens))
            raise RuntimeError("once")
        return logits

    monkeypatch.setattr(ModelRunner, "_forward", fail_once)
    trace, _ = record(reference, concurrency=4, unit="requests")
    assert failed
    assert trace.loads_NLE.tolist() == [reference.count(ids).tolist() for ids in reference.ids]


def test_a_row_that_fails_alone_as_well_leaves_its_step_out(
    reference_of, record, tmp_path, monkeypatch
):
    forward = ModelRunner._forward

    def fail_second_row(self, phase, cache, tokens):
        if phase == "decode" and (tokens.numel() > 1 or cache._window.first_row == 1):
            raise RuntimeError("no")
        return forward(self, phase, cache, tokens)

    monkeypatch.setattr(ModelRunner, "_forward", fail_second_row)
    with pytest.raises(EngineError, match="the model failed on this request"):
        record(reference_of("mixtral"), concurrency=4, seed=0)
    assert read_trace(tmp_path / "trace.npz").tokens_N.sum() > 0


def test_the_token_path_is_told_nothing_more_when_the_recording_is_over(
    reference_of, record, monkeypatch
):
    told = []
    observe = ExpertDispatcher.observe_choices
    monkeypatch.setattr(
        ExpertDispatcher,
        "observe_choices",
        lambda self, observer: (told.append(observer), observe(self, observer))[1],
    )
    record(reference_of("mixtral"), concurrency=2, limit=1)
    assert told[0] is not None
    assert told[-1] is None


@pytest.mark.parametrize("unit", ["steps", "requests"])
def test_an_interrupt_keeps_what_is_whole(reference_of, record, unit):
    reference = reference_of("mixtral")

    def interrupt(report):
        if report.feed.finished == 2:
            os.kill(os.getpid(), signal.SIGINT)

    trace, report = record(reference, concurrency=1, unit=unit, on_progress=interrupt)
    assert report.feed.interrupted
    assert 2 <= report.feed.finished < len(reference.ids)
    assert len(trace) == report.entries
    assert trace.meta.extra["recorded"]["interrupted"] is True
    if unit == "requests":
        expected = reference.ids[: len(trace)]
        assert trace.loads_NLE.tolist() == [reference.count(ids).tolist() for ids in expected]


def test_a_model_that_fails_ends_the_recording_and_keeps_what_came_before(
    reference_of, record, tmp_path, monkeypatch
):
    choose, calls = RowSampler.choose, []

    def fail_late(self, logits, row, best):
        calls.append(row)
        if len(calls) > 12:
            raise RuntimeError("worn out")
        return choose(self, logits, row, best)

    monkeypatch.setattr(RowSampler, "choose", fail_late)
    with pytest.raises(EngineError, match=r"holds the \d+ steps before it"):
        record(reference_of("mixtral"), concurrency=1)
    assert len(read_trace(tmp_path / "trace.npz")) > 2


def test_a_disk_that_is_full_from_the_start_ends_the_recording_and_says_so(
    reference_of, record, tmp_path, monkeypatch
):
    def have_no_room(self, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RoutingRecorder, "_join", have_no_room)
    with pytest.raises(TraceError, match="No space left on device"):
        record(reference_of("mixtral"), concurrency=1)
    assert not (tmp_path / "trace.npz").exists()
