"""``POST /v1/chat/completions``."""

import httpx
import pytest

from fakes.live_server import serve
from fakes.sse import parse_events, texts_by_index
from fakes.text_engine import FakeTextEngine
from moeless.core.generation import SamplingDefaults
from moeless.server import ServerSettings

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_an_answer_has_openais_shape(chat, engine):
    response = chat(temperature=0)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    answer = response.json()
    (choice,) = answer.pop("choices")
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "fake/model",
        "usage": {"prompt_tokens": 8, "completion_tokens": 24, "total_tokens": 32},
    }
    text, _ = engine.answer_to(engine.submitted[0])
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_chunks_join_to_the_whole_answer_and_end_with_the_usage(chat):
    whole = chat(seed=3).json()["choices"][0]["message"]["content"]
    response = chat(seed=3, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = parse_events(response.text)
    assert texts_by_index(chunks) == {0: whole}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("stop") == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 24,
        "total_tokens": 32,
    }
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_chunks_carry_no_usage_unless_it_is_asked_for(chat):
    assert all("usage" not in chunk for chunk in parse_events(chat(stream=True).text))


def test_absent_limits_mean_all_the_room_that_is_left(chat, engine):
    assert chat().status_code == 200
    assert engine.submitted[0].sampling.max_tokens == 256 - 8


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_answer(chat, name):
    answer = chat(**{name: 5}).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sampling_reaches_the_engine_as_it_was_asked(chat, engine):
    chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=-3,
        stop=["END", "\n\n"],
        ignore_eos=True,
        max_tokens=3,
        user="somebody",
    )
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (-3, ("END", "\n\n"), True)
    assert (sampling.max_tokens, sampling.logprobs) == (3, None)


def test_an_absent_temperature_is_openais_default(chat, engine):
    chat(temperature=None)
    assert engine.submitted[0].sampling.temperature == 1.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("asked", "advised", "expected"),
    [
        ({}, True, (0.6, 0.9, 20)),
        ({"temperature": None, "top_p": None, "top_k": None}, True, (0.6, 0.9, 20)),
        ({"temperature": 0, "top_p": 1}, True, (0.0, 1.0, 20)),
        ({"top_k": 0}, True, (0.6, 0.9, 0)),
        ({"top_k": -1}, True, (0.6, 0.9, 0)),
        ({}, False, (1.0, 1.0, 0)),
    ],
)
def test_what_a_request_leaves_open_is_sampled_as_the_model_advises_if_that_is_wanted(
    path, asked, advised, expected
):
    engine = FakeTextEngine(defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20))
    body = {"model": "fake/model", "max_tokens": 1} | asked
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    with serve(engine, settings=ServerSettings(advised_sampling=advised)) as server:
        assert httpx.post(f"{server.url}{path}", json=body | prompt).status_code == 200
    (request,) = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def test_several_choices_differ_and_the_first_is_that_of_n_1(chat, engine):
    one = chat(seed=5).json()
    three = chat(seed=5, n=3).json()
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert three["usage"] == {"prompt_tokens": 8, "completion_tokens": 72, "total_tokens": 80}
    streamed = parse_events(chat(seed=5, n=3, stream=True).text)
    assert texts_by_index(streamed) == dict(enumerate(texts))


def test_a_stop_string_ends_the_text_before_it(chat):
    whole = chat(temperature=0).json()["choices"][0]["message"]["content"]
    choice = chat(temperature=0, stop=whole[10:13]).json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(whole[10:13])]
    assert choice["finish_reason"] == "stop"


def test_log_probabilities_are_finite_and_have_their_bytes(chat):
    choice = chat(logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    characters = [bytes(token["bytes"]).decode() for token in content]
    assert characters == list(choice["message"]["content"])
    assert content[0]["logprob"] == -9999.0
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]


def test_text_parts_are_joined_by_line_ends(chat, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).status_code == 200
    assert engine.decode(engine.submitted[0].prompt_ids) == "<user>one\ntwo"


def test_a_developer_speaks_as_the_system(chat, engine):
    turns = [{"role": "developer", "content": "Be"}, {"role": "user", "content": "Hi"}]
    chat(messages=turns)
    assert engine.decode(engine.submitted[0].prompt_ids) == "<system>Be<user>Hi"


def test_an_earlier_answer_can_be_sent_back_as_it_came(chat):
    message = chat().json()["choices"][0]["message"]
    turns = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "And?"}]
    assert chat(messages=turns).status_code == 200


def test_what_the_template_refuses_is_the_messages_fault(chat):
    response = chat(messages=[{"role": "assistant", "content": "Hi"}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_fields_that_ask_for_nothing_are_accepted(chat):
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "response_format": {"type": "text"},
        "n": None,
        "stop": None,
        "store": False,
        "service_tier": "auto",
        "repetition_penalty": 1.0,
        "min_p": 0,
        "max_tokens": 4,
        "max_completion_tokens": 4,
        "stream": False,
    }
    assert chat(**neutral).status_code == 200


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def test_tools_that_are_not_to_be_called_are_accepted(chat):
    assert chat(tools=TOOLS, tool_choice="none").status_code == 200
    assert chat(functions=[{"name": "look"}], function_call="none").status_code == 200


def test_the_name_of_a_speaker_is_told_to_the_template(chat, monkeypatch, engine):
    told = []
    encode = engine.encode_chat
    monkeypatch.setattr(engine, "encode_chat", lambda m: told.extend(m) or encode(m))
    turns = [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "user", "content": "Ho"}]
    assert chat(messages=turns).status_code == 200
    assert told == turns


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", True),
        ("presence_penalty", False),
        ("logit_bias", {"5": 1}),
        ("tools", TOOLS),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "high"),
        ("modalities", ["audio"]),
        ("metadata", {"a": "b"}),
        ("repetition_penalty", 1.1),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", True),
        ("beams", 4),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(chat, field, value):
    response = chat(**{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
