"""Whatever a client sends, it gets an error in OpenAI's shape and harms nobody."""

import gzip
import json

import pytest

from moeless.server.schemas.chat import ChatBody
from moeless.server.schemas.completions import CompletionBody
from moeless.server.schemas.fields import Neutral

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def body_of(path, **fields):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    return {"model": "fake/model"} | prompt | fields


def raw(path, inside):
    """A body with ``inside`` pasted before its end, for what no encoder would write."""
    return json.dumps(body_of(path))[:-1].encode() + b"," + inside + b"}"


FIELDS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**12}, "n"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"logit_bias": float("nan")}, "logit_bias"),
    ({"model": 5}, "model"),
    ({"user": ["a"]}, "user"),
    ({"temprature": 1}, "temprature"),
    ({"": 1}, ""),
]
ONE_ENDPOINT = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.0]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**400]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    (CHAT, {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 10**9}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": 1}, "logprobs"),
]
WRONG_FIELDS = [(p, *case) for case in FIELDS for p in (CHAT, COMPLETIONS)] + ONE_ENDPOINT
DEEP = b"[" * 100_000
BODIES = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"text"',
    b"5",
    b'\xff\xfe{"model": 1}',
    b'{"model": "\xff"}',
    b"\xef\xbb\xbf{}",
    DEEP,
    DEEP + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"seed": ' + b"1" * 10_000 + b"}",
    raw(COMPLETIONS, b'"user": ' + DEEP[:900] + b"]" * 900),
    raw(COMPLETIONS, b'"x": ' + DEEP[:900] + b"]" * 900),
    raw(COMPLETIONS, b'"model": "fake/model"'),
    raw(COMPLETIONS, b'"user": "\\ud800"'),
    raw(COMPLETIONS, b'"\\ud800": 1'),
    raw(COMPLETIONS, b'"\\ud800": 1, "\\ud800": 1'),
    raw(COMPLETIONS, b'"temperature": NaN'),
    raw(COMPLETIONS, b'"temperature": -Infinity'),
    raw(COMPLETIONS, b'"temperature": 1e999'),
    raw(COMPLETIONS, b'"' + b"k" * 100_000 + b'": 1'),
    raw(CHAT, b'"x": 1}{'),
]


@pytest.fixture
def check(client):
    """Assert a 4xx in OpenAI's shape, and that a normal request answers as before."""

    def post_normal():
        return client.post(COMPLETIONS, json=body_of(COMPLETIONS, seed=4)).json()["choices"]

    before = post_normal()

    def run(response, status, param=None):
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert response.json().keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str), "programs tell errors apart by it"
        assert error["code"]
        assert error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 500
        if param is not None:
            assert error["param"] == param
        assert post_normal() == before
        return error

    return run


@pytest.mark.parametrize(("path", "fields", "param"), WRONG_FIELDS)
def test_a_wrong_field_is_a_400_that_names_it(client, check, path, fields, param):
    content = json.dumps(body_of(path, **fields)).encode()
    headers = {"content-type": "application/json"}
    check(client.post(path, content=content, headers=headers), 400, param)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_broken_body_is_a_400(client, check, body):
    check(client.post(COMPLETIONS, content=body), 400)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_a_body_in_an_encoding_is_a_415_that_says_so(client, check, encoding):
    body = gzip.compress(json.dumps(body_of(COMPLETIONS)).encode())
    headers = {"content-encoding": encoding}
    error = check(client.post(COMPLETIONS, content=body, headers=headers), 415)
    assert "Content-Encoding" in error["message"]


def neutral_fields():
    """Each field that only takes what asks for nothing, with that."""
    for path, model in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        for name, field in model.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Neutral) and mark.allowed:
                    yield path, name, mark.allowed[0]


@pytest.mark.parametrize(("path", "name", "allowed"), list(neutral_fields()))
def test_what_an_error_offers_can_be_sent_as_it_is_written(client, check, path, name, allowed):
    error = check(client.post(path, json=body_of(path, **{name: {"no": "such"}})), 400, name)
    offer = error["message"].partition(" or send ")[2]
    assert json.loads(offer) == allowed
    content = raw(path, f'"{name}": {offer}'.encode())
    assert client.post(path, content=content).status_code == 200


def test_a_list_of_what_may_be_sent_is_spelled_as_json(client, check):
    messages = [{"role": "nobody", "content": "x"}]
    error = check(client.post(CHAT, json=body_of(CHAT, messages=messages)), 400)
    assert '"user"' in error["message"]
    assert "'" not in error["message"]


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(client, check, field):
    body = body_of(CHAT)
    del body[field]
    error = check(client.post(CHAT, json=body), 400, field)
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_another_model_is_not_found(client, check, path):
    error = check(client.post(path, json=body_of(path, model="gpt-5")), 404, "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 256}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 1_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 250, "max_tokens": 7}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 1_000_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (CHAT, {"messages": MESSAGES * 100_000}, "messages"),
        (CHAT, {"max_completion_tokens": 249}, "max_completion_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_a_400(client, check, path, fields, param):
    error = check(client.post(path, json=body_of(path, **fields)), 400, param)
    assert error["code"] == "context_length_exceeded"


def test_a_body_that_is_too_long_is_a_413(client, check):
    check(client.post(COMPLETIONS, content=b" " * (5 * 1024 * 1024)), 413)
    chunks = (b" " * 100_000 for _ in range(60))
    check(client.post(COMPLETIONS, content=chunks), 413)


def test_other_media_types_are_a_415(client, check):
    check(client.post(COMPLETIONS, data={"model": "fake/model"}), 415)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("GET", "/v1/models/none", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions/", 405),
        ("GET", "/moeless/experts", 404),
        ("GET", "/%ff%00/%0d%0a", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_places_and_methods_have_the_same_shape(client, check, method, path, status):
    response = client.request(method, path)
    check(response, status)
    assert ("allow" in response.headers) == (status == 405)
