"""No request takes the engine down; failures stay with their request."""

import threading
from contextlib import contextmanager

import pytest
import torch

from effort import PATIENCE_S
from moeless.core.generation import TextEngine
from moeless.errors import (
    EngineError,
    FunctionError,
    QueueFullError,
    RequestError,
    UnavailableError,
)

POISON = 313


class Saboteur:
    """Makes a model fail on demand, from a hook on its embedding."""

    def __init__(self, model):
        self.error = None
        self.poison_only = False
        self.slow = None
        self.seen = None
        model.get_input_embeddings().register_forward_pre_hook(self._check)

    def _check(self, _module, args):
        if self.slow is not None:
            self.slow.wait(PATIENCE_S)
        self.seen = args[0]
        if self.error is None or (self.poison_only and not bool((args[0] == POISON).any())):
            return
        raise self.error


def last(stream):
    return list(stream)[-1]


def wait_until(condition):
    """Wait for what the engine thread does between two steps."""
    ready = threading.Event()
    for _ in range(2000):
        if condition():
            return
        ready.wait(0.01)
    raise AssertionError("it did not happen")


def test_the_engine_is_a_text_engine(granite, start_engine):
    engine = start_engine(granite)
    assert isinstance(engine, TextEngine)
    assert engine.model_id == "tiny"
    assert engine.max_model_len == 512
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.healthy, stats.reason) == (0, 0, True, None)
    assert (stats.max_batch_size, stats.max_model_len) == (32, 512)


@pytest.mark.parametrize("position", ["in its prompt", "while it runs"])
def test_only_the_guilty_request_fails(
    position, granite, start_engine, make_request, generate_alone
):
    saboteur = Saboteur(granite)
    good = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    expected = [generate_alone(granite, prompt, 30) for prompt in good]
    saboteur.error, saboteur.poison_only = ValueError("secret words of the prompt"), True
    engine = start_engine(granite)
    if position == "while it runs":
        # The guilty request's first token is the poison: its prompt works, decoding fails.
        head = granite.get_output_embeddings()
        head.register_forward_hook(
            lambda _m, _a, out: (
                out.index_fill(-1, torch.tensor([POISON]), 1e4)
                if saboteur.seen.tolist() == [[20, 21]]
                else None
            )
        )
    streams = [engine.submit(make_request(prompt, max_tokens=30)) for prompt in good]
    if position == "while it runs":
        readers = [iter(stream) for stream in streams]
        found = [list(next(reader).token_ids) for reader in readers]
        guilty = engine.submit(make_request([20, 21], max_tokens=30))
        event = next(iter(guilty))
        assert event.token_ids == (POISON,)
        for tokens, reader in zip(found, readers, strict=True):
            tokens.extend(token_id for event in reader for token_id in event.token_ids)
    else:
        guilty = engine.submit(make_request([20, POISON], max_tokens=30))
        found = [[t for event in stream for t in event.token_ids] for stream in streams]
    ending = last(guilty)
    assert ending.finish_reason == "error"
    assert ending.error == "the model failed on this request (ValueError)"
    assert found == expected
    assert engine.stats().healthy


def test_an_error_of_our_own_is_passed_on_in_one_line(granite, start_engine, make_request):
    saboteur = Saboteur(granite)
    saboteur.error = FunctionError("no device is left for layer 3\nmore")
    engine = start_engine(granite)
    ending = last(engine.submit(make_request([5, 6], max_tokens=3)))
    assert ending.error == "no device is left for layer 3"


@pytest.mark.parametrize(
    ("error", "unavailable"), [(UnavailableError("no device is left"), True), (KeyError(), False)]
)
def test_an_error_says_whether_it_may_help_to_try_again(
    granite, start_engine, make_request, error, unavailable
):
    saboteur = Saboteur(granite)
    saboteur.error = error
    engine = start_engine(granite)
    assert last(engine.submit(make_request([5, 6]))).unavailable is unavailable


def test_a_broken_model_makes_the_engine_unhealthy_until_a_try_succeeds(
    granite, start_engine, make_request
):
    saboteur = Saboteur(granite)
    engine = start_engine(granite, first_retry_s=0.01)
    running = engine.submit(make_request([5, 6], max_tokens=400, ignore_eos=True))
    next(iter(running))
    saboteur.error = RuntimeError("boom")
    while engine.stats().healthy:
        try:
            stream = engine.submit(make_request([5, 6], max_tokens=3))
        except EngineError:
            break
        assert last(stream).finish_reason == "error"
    with pytest.raises(EngineError, match="unhealthy"):
        engine.submit(make_request([5, 6], max_tokens=3))
    assert last(running).finish_reason == "error"
    stats = engine.stats()
    assert not stats.healthy
    assert "in a row" in stats.reason
    saboteur.error = None
    wait_until(lambda: engine.stats().healthy)
    assert last(engine.submit(make_request([5, 6], max_tokens=3))).finish_reason in (
        "length",
        "stop",
    )


def test_logits_that_are_not_finite_end_their_request_and_harm_no_other(
    granite, start_engine, make_request, generate_alone
):
    expected = generate_alone(granite, [5, 6, 7], 40)
    embedding = granite.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _module, args, out: out.masked_fill((args[0] == POISON)[..., None], float("nan"))
    )
    engine = start_engine(granite)
    good = engine.submit(make_request([5, 6, 7], max_tokens=40))
    bad = engine.submit(make_request([8, POISON, 9], max_tokens=40))
    after = engine.submit(make_request([5, 6, 7], max_tokens=40))
    assert "not finite" in last(bad).error
    for stream in (good, after):
        assert [t for event in stream for t in event.token_ids] == expected


def test_a_request_that_waits_prefills_or_runs_can_be_cancelled_at_once(
    granite, start_engine, make_request
):
    engine = start_engine(granite, max_batch_size=1, prefill_chunk_tokens=4)
    saboteur = Saboteur(granite)
    requests = [make_request([5] * 100, max_tokens=400, ignore_eos=True) for _ in range(3)]
    saboteur.slow = threading.Event()
    streams = [engine.submit(request) for request in requests]
    for request, stream in zip(requests[1:], streams[1:], strict=True):
        engine.cancel(request.request_id)
        engine.cancel(request.request_id)
        assert last(stream).finish_reason == "cancelled"  # although a forward is under way
    saboteur.slow.set()
    reader = iter(streams[0])
    next(reader)
    engine.cancel(requests[0].request_id)
    *_, ending = reader
    assert ending.finish_reason == "cancelled"
    assert ending.prompt_tokens == 100
    engine.cancel("never heard of")
    wait_until(lambda: engine.stats().running == 0)
    assert engine.stats().waiting == 0


def test_a_full_queue_says_when_to_try_again(granite, start_engine, make_request):
    saboteur = Saboteur(granite)
    saboteur.slow = threading.Event()
    engine = start_engine(granite, max_batch_size=2, max_waiting=3)
    streams = [engine.submit(make_request([5, 6], max_tokens=2)) for _ in range(5)]
    with pytest.raises(QueueFullError, match="3 requests wait") as caught:
        engine.submit(make_request([5, 6], max_tokens=2))
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    saboteur.slow.set()
    assert all(last(stream).finish_reason in ("length", "stop") for stream in streams)
    last(engine.submit(make_request([5, 6], max_tokens=2)))


def test_two_live_requests_cannot_have_one_id(granite, start_engine, make_request):
    saboteur = Saboteur(granite)
    saboteur.slow = threading.Event()
    engine = start_engine(granite)
    request = make_request([5, 6], max_tokens=2)
    stream = engine.submit(request)
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request)
    saboteur.slow.set()
    last(stream)
    last(engine.submit(request))


def test_what_cannot_fit_is_refused_before_it_is_queued(granite, start_engine, make_request):
    engine = start_engine(granite, max_model_len=64)
    with pytest.raises(RequestError) as caught:
        engine.submit(make_request([5] * 60, max_tokens=5))
    assert caught.value.code == "context_length_exceeded"
    stream = engine.submit(make_request([5] * 60, max_tokens=4, ignore_eos=True))
    assert last(stream).completion_tokens == 4


def test_closing_ends_all_streams_and_refuses_new_requests(granite, start_engine, make_request):
    engine = start_engine(granite, max_batch_size=2)
    streams = [
        engine.submit(make_request([5, 6], max_tokens=500, ignore_eos=True)) for _ in range(5)
    ]
    next(iter(streams[0]))
    engine.close()
    engine.close()
    assert {last(stream).finish_reason for stream in streams} == {"cancelled"}
    assert not engine.stats().healthy
    with pytest.raises(EngineError, match="closed"):
        engine.submit(make_request([5, 6], max_tokens=2))


def test_an_observer_or_tokenizer_that_fails_does_no_harm(
    granite, start_engine, make_request, monkeypatch
):
    class Broken:
        def __getattr__(self, name):
            def fail(*_args):
                raise RuntimeError(name)

            return fail

    engine = start_engine(granite, observer=Broken())
    assert last(engine.submit(make_request([5, 6], max_tokens=4))).finish_reason == "length"
    original = engine._codec.decode

    def fail_on_long(token_ids):
        if len(token_ids) > 2:
            raise RuntimeError("tokenizer")
        return original(token_ids)

    monkeypatch.setattr(engine._codec, "decode", fail_on_long)
    ending = last(engine.submit(make_request([5, 6], max_tokens=9, ignore_eos=True)))
    assert (ending.finish_reason, ending.completion_tokens) == ("error", 3)
    monkeypatch.undo()
    assert last(engine.submit(make_request([5, 6], max_tokens=4))).finish_reason == "length"


def test_every_forward_runs_inside_its_step_context(granite, start_engine, make_request):
    seen = []
    inside = []

    @contextmanager
    def mark(phase, tokens):
        inside.append((phase, tokens))
        yield
        seen.append(inside.pop())

    granite.get_input_embeddings().register_forward_hook(
        lambda _module, args, _out: (
            None if inside == [(inside[0][0], args[0].numel())] else pytest.fail("outside a step")
        )
    )
    engine = start_engine(granite, on_step=mark, prefill_chunk_tokens=4)
    last(engine.submit(make_request([5] * 6, max_tokens=4, ignore_eos=True)))
    assert seen == [("prefill", 4), ("prefill", 2), *[("decode", 1)] * 3]


def test_a_step_context_that_fails_is_a_failure_of_the_forward(
    granite, start_engine, make_request
):
    @contextmanager
    def mark(phase, _tokens):
        if phase == "decode":
            raise FunctionError("the workers are gone")
        yield

    engine = start_engine(granite, on_step=mark)
    ending = last(engine.submit(make_request([5, 6], max_tokens=4, ignore_eos=True)))
    assert (ending.error, ending.completion_tokens) == ("the workers are gone", 1)


def test_a_cache_that_cannot_grow_ends_the_longest_request_only(
    granite, start_engine, make_request, monkeypatch
):
    engine = start_engine(granite)
    batch = engine._loop._batch
    original = batch.reserve
    refusals = iter([False] * 5 + [True])

    def reserve(new_tokens):
        if next(refusals, False):
            raise MemoryError
        original(new_tokens)

    monkeypatch.setattr(batch, "reserve", reserve)
    short = engine.submit(make_request([5, 6], max_tokens=20, ignore_eos=True))
    long = engine.submit(make_request([5] * 20, max_tokens=20, ignore_eos=True))
    assert {last(short).finish_reason, last(long).finish_reason} == {"length", "error"}
