"""An engine that is full, down or failing."""

import httpx
import pytest

from effort import PATIENCE_S
from fakes.live_server import serve
from fakes.sse import parse_events, texts_by_index
from fakes.text_engine import FakeTextEngine
from moeless.errors import EngineError, UnavailableError
from moeless.server import ServerSettings


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_return(chat, engine, stream):
    engine.queue_limit = 0
    response = chat(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["code"] == "queue_full"


def test_a_request_that_fits_only_in_part_leaves_nothing_behind(chat, engine):
    engine.queue_limit = 2
    assert chat(n=3).status_code == 429
    assert engine.cancelled == [request.request_id for request in engine.submitted]
    assert len(engine.cancelled) == 2
    assert chat(n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_down_is_a_503(chat, client, engine, stream):
    engine.down = "no device is left"
    response = chat(stream=stream)
    assert response.status_code == 503
    assert "no device is left" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 503


GONE = UnavailableError("a device is lost")
FAILURES = [
    ({"fail_with": None}, 500, "server_error"),
    ({"fail_with": EngineError("a device is lost")}, 500, "server_error"),
    ({"fail_with": None, "fails_unavailable": True}, 503, "service_unavailable"),
    ({"fail_with": GONE}, 503, "service_unavailable"),
]


def break_engine(engine, failure):
    engine.fail_after = 3
    for name, value in failure.items():
        setattr(engine, name, value)


@pytest.mark.parametrize(("failure", "status", "kind"), FAILURES)
def test_an_engine_that_fails_on_the_way_is_a_500_or_if_it_may_return_a_503(
    chat, engine, failure, status, kind
):
    break_engine(engine, failure)
    response = chat(n=2)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert "a device is lost" in response.json()["error"]["message"]
    assert (int(response.headers.get("retry-after", 0)) > 0) == (status == 503)
    engine.reset()
    assert chat().status_code == 200


@pytest.mark.parametrize(("failure", "status", "kind"), FAILURES)
def test_a_stream_that_fails_says_so_and_is_closed(chat, engine, failure, status, kind):
    break_engine(engine, failure)
    response = chat(stream=True, temperature=0, stream_options={"include_usage": True})
    assert response.status_code == 200
    *chunks, last = parse_events(response.text)
    assert texts_by_index(chunks) == {0: engine.answer_to(engine.submitted[0])[0][:3]}
    assert "a device is lost" in last["error"]["message"]
    assert last["error"]["type"] == kind


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_engine_is_not_shown_to_the_client(chat, engine, stream, caplog):
    engine.fail_after, engine.fail_with = 3, KeyError("a secret prompt")
    response = chat(stream=stream)
    assert response.status_code == (200 if stream else 500)
    body = parse_events(response.text)[-1] if stream else response.json()
    assert body["error"]["code"] == "internal_error"
    assert "secret" not in response.text + caplog.text
    assert "KeyError" in caplog.text


def test_requests_beyond_the_servers_own_limit_are_a_429():
    engine = FakeTextEngine()
    body = {"model": "fake/model", "prompt": "Hi", "stream": True}
    engine.stall_after = 1
    with (
        serve(engine, settings=ServerSettings(max_concurrent=1, drain_s=0)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        assert first.status_code == 200
        second = client.post("/v1/completions", json=body)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    engine = FakeTextEngine()
    engine.stall_after = 2
    body = {"model": "fake/model", "prompt": "Hi", "stream": stream}
    with serve(engine, settings=ServerSettings(request_timeout_s=0.1)) as server:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == (200 if stream else 504)
    error = (parse_events(response.text)[-1] if stream else response.json())["error"]
    assert error["code"] == "timeout"
    assert engine.cancelled == [engine.submitted[0].request_id]


def test_nothing_is_generated_before_the_engine_is_ready():
    with serve(FakeTextEngine(), ready=lambda: False) as server:
        body = {"model": "fake/model", "prompt": "Hi"}
        response = httpx.post(f"{server.url}/v1/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
        assert httpx.get(f"{server.url}/health").status_code == 503
