"""Text, ends, log-probabilities, seeds, chat, observers: what a server sees."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from moeless.core.generation import SamplingDefaults
from moeless.engines.transformers.generation import GenerationObserver
from moeless.engines.transformers.generation.model_facts import advised_sampling
from moeless.engines.transformers.generation.text_codec import (
    read_chat_template,
    use_chat_template,
)
from moeless.engines.transformers.loader import load_engine_model
from moeless.errors import ConfigError, ModelError, RequestError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def engine(granite, start_engine):
    return start_engine(granite)


def events_of(engine, request):
    return list(engine.submit(request))


def joined(events):
    return "".join(event.text for event in events)


def tokens(events):
    return [token_id for event in events for token_id in event.token_ids]


def test_joined_text_is_the_text_of_all_tokens(engine, make_request):
    for seed in range(20):
        sampling = {"max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        events = events_of(engine, make_request([5, 6, 7], **sampling))
        assert joined(events) == engine.decode(tokens(events))
        assert len(tokens(events)) == 60
        assert (events[-1].finish_reason, events[-1].completion_tokens) == ("length", 60)
        assert all(event.finish_reason is None for event in events[:-1])
        assert all(event.prompt_tokens == 3 for event in events)


def test_a_stop_string_ends_the_text_before_it_even_across_tokens(engine, make_request):
    sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    whole = joined(events_of(engine, make_request([9, 9], **sampling)))
    stop = whole[10:14]
    events = events_of(engine, make_request([9, 9], **sampling, stop=(stop, "never there")))
    assert events[-1].finish_reason == "stop"
    assert joined(events) == whole[: whole.index(stop)]
    assert events[-1].completion_tokens < 60


def test_the_end_token_stops_is_counted_and_adds_no_text(granite, engine, make_request):
    free = events_of(engine, make_request([40, 41], max_tokens=50, ignore_eos=True))
    end = tokens(free)[4]
    where = tokens(free).index(end)
    engine._eos_ids = frozenset([end])
    events = events_of(engine, make_request([40, 41], max_tokens=50))
    assert tokens(events) == tokens(free)[: where + 1]
    assert (events[-1].finish_reason, events[-1].completion_tokens) == ("stop", where + 1)
    assert joined(events) == engine.decode(tokens(free)[:where])
    ignored = events_of(engine, make_request([40, 41], max_tokens=50, ignore_eos=True))
    assert tokens(ignored) == tokens(free)


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(granite, start_engine):
    granite.generation_config.eos_token_id = [7, 9]
    assert start_engine(granite)._eos_ids == {2, 7, 9}
    granite.generation_config.eos_token_id = 8
    assert start_engine(granite)._eos_ids == {2, 8}
    granite.generation_config.eos_token_id = None
    assert start_engine(granite)._eos_ids == {2}


def test_a_seed_gives_the_same_text_alone_and_in_company(engine, make_request):
    sampling = {"max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = tokens(events_of(engine, make_request([5, 6], **sampling)))
    company = [
        engine.submit(make_request([7, seed], max_tokens=50, temperature=1.0, seed=seed))
        for seed in range(3, 9)
    ]
    assert tokens(events_of(engine, make_request([5, 6], **sampling))) == alone
    for stream in company:
        list(stream)


def test_logprobs_come_with_each_token(granite, engine, make_request):
    events = events_of(engine, make_request([5, 6, 7], max_tokens=5, logprobs=3))
    context = [5, 6, 7]
    for event in events:
        (found,) = event.logprobs
        with torch.no_grad():
            expected = granite(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert found.token_id == event.token_ids[0]
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)
        assert [token_id for token_id, _, _ in found.top] == expected.topk(3).indices.tolist()
        assert found.token == engine._codec.decode_token(found.token_id)
        context.append(found.token_id)


def test_many_asynchronous_readers_get_the_same_as_blocking_ones(engine, make_request):
    prompts = [[5, 6, number] for number in range(3, 203)]
    expected = [tokens(engine.submit(make_request(p, max_tokens=5))) for p in prompts[:20]]

    async def read(prompt):
        stream = engine.submit(make_request(prompt, max_tokens=5))
        found = []
        while (event := await stream.next_event()) is not None:
            found.append(event)
        return tokens(found)

    async def main():
        return await asyncio.gather(*(read(prompt) for prompt in prompts))

    found = asyncio.run(main())
    assert found[:20] == expected
    assert all(found)


def test_requests_may_come_from_many_threads(engine, make_request):
    found = {}

    def work(index):
        prompt = engine.encode(f"thread {index}")
        found[index] = tokens(events_of(engine, make_request(prompt, max_tokens=6)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(12):
        prompt = engine.encode(f"thread {index}")
        assert found[index] == tokens(events_of(engine, make_request(prompt, max_tokens=6)))


def test_text_goes_to_tokens_and_back(engine):
    assert engine.decode(engine.encode("Grüße, 字!")) == "Grüße, 字!"
    with pytest.raises(RequestError, match="cannot be encoded"):
        engine.encode("half of a pair: \ud83d")


def test_chat_follows_the_template_or_says_why_not(granite, start_engine, tokenizer):
    engine = start_engine(granite)
    with pytest.raises(RequestError, match="no chat template"):
        engine.encode_chat([{"role": "user", "content": "hi"}])
    tokenizer.chat_template = TEMPLATE
    try:
        ids = engine.encode_chat([{"role": "user", "content": "hi"}])
        assert engine.decode(ids) == "user: hi\nassistant:"
        with pytest.raises(RequestError, match="no tools here") as caught:
            engine.encode_chat([{"role": "tool", "content": "x"}])
        assert caught.value.param == "messages"
    finally:
        tokenizer.chat_template = None


def test_a_template_of_the_operator_s_takes_the_place_of_the_model_s(
    granite, start_engine, tokenizer, tmp_path
):
    tokenizer.chat_template = "{{ raise_exception('the model has one of its own') }}"
    engine, file = start_engine(granite), tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    try:
        use_chat_template(tokenizer, read_chat_template(file))
        ids = engine.encode_chat([{"role": "user", "content": "hi"}])
        assert engine.decode(ids) == "user: hi\nassistant:"
        with pytest.raises(ConfigError, match="line 2: "):
            use_chat_template(tokenizer, "{# two lines #}\n{% for m in messages %}")
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"", "empty"), (b" \n", "empty"), (b"\xff", "not UTF-8")],
)
def test_a_file_without_a_template_is_refused_by_its_name(tmp_path, content, reason):
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"template\.jinja.*{reason}"):
        read_chat_template(file)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_is_found_wherever_a_checkpoint_keeps_it(granite, tokenizer, tmp_path, name):
    granite.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    as_json = json.dumps({"chat_template": TEMPLATE})
    (tmp_path / name).write_text(as_json if name.endswith("json") else TEMPLATE)
    assert load_engine_model(tmp_path).tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ({}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"temperature": 0, "do_sample": False}, (0.0, 1.0, 0)),
        ({"temperature": -1, "top_p": 0, "top_k": 2.5}, (1.0, 1.0, 0)),
        ({"temperature": float("nan"), "top_p": "much", "top_k": float("inf")}, (1.0, 1.0, 0)),
    ],
)
def test_what_the_generation_config_advises_is_known_and_what_is_no_advice_left_out(
    given, advised, caplog
):
    found = advised_sampling(SimpleNamespace(**given))
    assert (found.temperature, found.top_p, found.top_k) == advised
    assert len(caplog.records) == sum(advised == (1.0, 1.0, 0) for _ in given)


def test_the_advice_of_a_checkpoint_reaches_the_engine(granite, start_engine):
    granite.generation_config = GenerationConfig(temperature=0.7, top_k=40)
    assert start_engine(granite).sampling_defaults == SamplingDefaults(temperature=0.7, top_k=40)


def test_an_observer_hears_of_tokens_steps_and_ends(granite, start_engine, make_request):
    calls = []

    class Recorder(GenerationObserver):
        def request_submitted(self, prompt_tokens):
            calls.append(("submitted", prompt_tokens))

        def first_token(self, ttft_s, prompt_tokens):
            calls.append(("first", ttft_s > 0, prompt_tokens))

        def next_token(self, inter_token_s):
            calls.append(("next", inter_token_s > 0))

        def step_finished(self, phase, tokens, duration_s):
            calls.append(("step", phase, tokens, duration_s > 0))

        def request_finished(self, reason, prompt_tokens, completion_tokens, duration_s):
            calls.append(("finished", reason, prompt_tokens, completion_tokens, duration_s > 0))

    ticks = iter(range(10**6))
    engine = start_engine(granite, observer=Recorder(), clock=lambda: float(next(ticks)))
    events_of(engine, make_request([5] * 6, max_tokens=3, ignore_eos=True))
    engine.close()
    assert sorted(calls, key=str) == sorted(
        [
            ("submitted", 6),
            ("step", "prefill", 6, True),
            ("first", True, 6),
            *[("step", "decode", 1, True), ("next", True)] * 2,
            ("finished", "length", 6, 3, True),
        ],
        key=str,
    )


def test_a_context_beyond_the_model_or_layers_with_other_state_are_refused(granite, start_engine):
    with pytest.raises(ConfigError, match=r"600.*up to 512"):
        start_engine(granite, max_model_len=600)
    granite.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        start_engine(granite)
