"""``POST /v1/completions``."""

import pytest

from fakes.sse import parse_events, texts_by_index


def test_an_answer_has_openais_shape(complete, engine):
    answer = complete(temperature=0).json()
    text, _ = engine.answer_to(engine.submitted[0])
    assert len(text) == 16, "OpenAI's default"
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "fake/model",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18},
    }


def test_the_default_length_shrinks_to_the_room_that_is_left(complete):
    answer = complete(prompt="x" * 250).json()
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [72, 111, 33]], ["Hi", "Ho!"]),
    ],
)
def test_every_kind_of_prompt_has_its_choices_in_order(complete, engine, prompt, prompts):
    answer = complete(prompt=prompt, n=2, seed=1, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    expected = [
        prompt + engine.answer_to(request)[0]
        for prompt, request in zip(
            [prompt for prompt in prompts for _ in range(2)], engine.submitted, strict=True
        )
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    chunks = parse_events(complete(prompt=prompt, n=2, seed=1, echo=True, stream=True).text)
    assert texts_by_index(chunks) == dict(enumerate(expected))


def test_a_prompt_gets_the_same_answer_alone_and_in_a_list(complete):
    alone = complete(prompt="Ho", seed=9).json()["choices"][0]["text"]
    listed = complete(prompt=["Hi", "Ho"], seed=9).json()["choices"][1]["text"]
    assert alone == listed


def test_chunks_end_with_reason_and_usage(complete):
    response = complete(stream=True, stream_options={"include_usage": True}, max_tokens=4)
    chunks = parse_events(response.text)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 6


def test_log_probabilities_have_offsets_and_alternatives(complete):
    logprobs = complete(logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-9999.0] * 3
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 3
    assert {"a": -0.5, "b": -1.5}.items() <= logprobs["top_logprobs"][0].items()
    assert complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_streamed_offsets_go_on_where_the_last_chunk_ended(complete):
    chunks = parse_events(complete(logprobs=1, max_tokens=3, stream=True).text)
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [1], [2], []]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"prompt": [5, 0x110000]}, "prompt"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(complete, engine, fields, param):
    response = complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_best_of_n_asks_for_nothing(complete):
    assert complete(best_of=2, n=2).status_code == 200
