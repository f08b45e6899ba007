"""An engine that is full, down or failing."""

import httpx
import pytest

from effort import PATIENCE_S, wait_until
from fakes.live_server import serve
from fakes.sse import parse_events, texts_by_index
from fakes.text_engine import FakeTextEngine
from moeless.errors import EngineError, FunctionError, RequestError, UnavailableError
from moeless.server import ServerSettings
from moeless.server.errors import without_paths


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


PATHS = [
    "/home/ann/models/OLMoE/model-00001.safetensors",
    "/home/ann/my models/x/config.json",
    "~/models/x/config.json",
    "/srv/x",
]


@pytest.fixture(params=PATHS)
def tells_path(request):
    """A message of the engine with a path, and what of that nobody may see."""
    folder = request.param.rpartition("/")[0] + "/"
    return f"layer 1, expert 2: shard {request.param} is missing; download it", folder


def refuse_to_encode(engine, text):
    def refuse(_):
        raise RequestError(text)

    engine.encode = refuse


def fail_with(error):
    return lambda engine, text: break_engine(engine, {"fail_with": error(text)})


WAYS = {
    "down": lambda engine, text: setattr(engine, "down", text),
    "raises": fail_with(EngineError),
    "is unavailable": fail_with(UnavailableError),
    "ends": lambda engine, text: break_engine(engine, {"fails_with_reason": text}),
    "may return": lambda engine, text: break_engine(
        engine, {"fails_with_reason": text, "fails_unavailable": True}
    ),
    "refuses": refuse_to_encode,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_clients_are_not_told_where_files_are_on_the_server(tells_path, way, stream):
    text, folder = tells_path
    engine = FakeTextEngine()
    WAYS[way](engine, text)

    def lost():
        raise FunctionError(text)

    with serve(engine, experts_snapshot=lost, live=lost) as server:
        answers = [post(server, stream=stream) for _ in range(4)]
        answers += [
            httpx.get(f"{server.url}{path}")
            for path in ("/health", "/moeless/experts", "/moeless/live")
        ]
    assert "is missing; download it" in answers[0].text
    assert [answer.url.path for answer in answers if folder in answer.text] == []


@pytest.mark.parametrize(
    "text",
    [
        "the engine is starting: see http://127.0.0.1:8000/health",
        "12 tokens/s, model fake/model, 1/2 of the layers, and/or",
        "layer 3: experts 0, 1 were not loaded within 60 s",
    ],
)
def test_what_is_no_path_is_told_as_it_is(text):
    assert without_paths(text) == text


def post(server, **fields):
    body = {"model": "fake/model", "prompt": "Hi"} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def health(server):
    return httpx.get(f"{server.url}/health")


def test_a_server_whose_requests_all_fail_is_not_ready_until_it_works_again_by_itself(caplog):
    engine = FakeTextEngine()
    with serve(engine) as server:
        break_engine(engine, {"fail_with": GONE})
        for count in range(3):
            assert health(server).status_code == 200, f"after {count} failures"
            assert post(server).status_code == 503
        answer = health(server)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "degraded"
        assert "the last 3 requests could not be served" in answer.json()["error"]["message"]
        assert post(server).status_code == 503, "it is tried all the same"
        engine.reset()
        wait_until(lambda: health(server).status_code == 200)
        assert [r.request_id.partition("-")[0] for r in engine.submitted] == ["probe"]
        assert engine.submitted[0].prompt_ids == tuple(map(ord, "Hi"))
    told = [r.getMessage() for r in caplog.records if r.name == "moeless.server.readiness"]
    assert len(told) == 2


def test_a_request_that_is_served_makes_the_server_ready_at_once():
    engine = FakeTextEngine()
    with serve(engine) as server:
        break_engine(engine, {"fail_with": None, "fails_unavailable": True})
        for _ in range(3):
            post(server, stream=True)
        assert health(server).status_code == 503
        engine.fail_after = None
        assert post(server).status_code == 200
        assert health(server).status_code == 200


def test_what_fails_at_the_same_time_or_for_a_reason_of_its_own_leaves_the_server_ready():
    engine = FakeTextEngine()
    with serve(engine) as server:
        break_engine(engine, {"fail_with": GONE})
        assert post(server, n=8).status_code == 503
        assert health(server).status_code == 200
        engine.reset()
        assert post(server).status_code == 200
        for fields, how in (
            ({}, {"fail_with": EngineError("odd")}),
            ({}, {"fail_with": KeyError("odd")}),
            ({"prompt": ""}, {}),
        ):
            break_engine(engine, how)
            for _ in range(5):
                assert post(server, **fields).status_code >= 400
            assert health(server).status_code == 200


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
