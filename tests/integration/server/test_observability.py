"""What the server tells of its requests: ids, log lines, latencies, traces."""

import logging

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from effort import PATIENCE_S, wait_until
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.errors import ConfigError
from moeless.server import ApiKey, ServerSettings
from moeless.telemetry.tracing import TraceConfig, Tracing

BODY = {"model": "fake/model", "prompt": "a very private prompt", "max_tokens": 5}
PATH = "/v1/completions"


@pytest.mark.parametrize("given", ["abc-1", "trace:1/2+3=", "x" * 128])
def test_a_client_s_request_id_comes_back(client, given):
    response = client.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", ["", "x" * 129, "two words", "caf\u00e9".encode("latin-1"), 'a"b']
)
def test_an_id_that_cannot_be_logged_is_replaced(client, given):
    response = client.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req-")


def requests_logged(caplog):
    return [record.fields for record in caplog.records if record.name == "moeless.requests"]


def test_each_request_is_a_line_without_its_text(caplog):
    caplog.set_level(logging.INFO)
    settings = ServerSettings(api_keys=(ApiKey(name="alice", secret="open sesame"),))
    with serve(FakeTextEngine(), settings=settings) as server:
        headers = {"authorization": "Bearer open sesame"}
        answer = httpx.post(f"{server.url}{PATH}", json=BODY, headers=headers).json()
        httpx.post(f"{server.url}{PATH}", json=BODY, headers={"authorization": "Bearer no"})
        httpx.get(f"{server.url}/health")  # probes are logged at debug
        httpx.get(f"{server.url}/secret/path?secret=query")
        wait_until(lambda: len(requests_logged(caplog)) == 3)
    good, refused, lost = requests_logged(caplog)
    assert good.pop("duration_ms") >= good.pop("first_token_ms") > 0
    assert good == {
        "method": "POST",
        "path": PATH,
        "status": 200,
        "key": "alice",
        "answer_id": answer["id"],
        "outcome": "finished",
        "prompt_tokens": len(BODY["prompt"]),
        "generated_tokens": 5,
    }
    assert (refused["status"], "key" in refused) == (401, False)
    assert (lost["status"], lost["path"]) == (404, "other")
    everything = str([vars(r) for r in caplog.records if r.name.startswith("moeless")])
    assert not [word for word in ("private", "sesame", "secret") if word in everything]


def test_refusals_and_the_time_of_output_tokens_are_counted(client, complete):
    complete(max_tokens=4, n=2)
    client.get("/v1/models", headers={"origin": "http://evil.example"})
    text = client.get("/metrics").text
    assert 'moeless_http_refused_total{code="cross_origin"} ' in text
    assert f'moeless_time_per_output_token_seconds_count{{path="{PATH}"}}' in text


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def traced(spans):
    config = TraceConfig(endpoint="http://127.0.0.1:1", sample=0.0)
    engine = FakeTextEngine()
    tracing = Tracing(config, SimpleSpanProcessor(spans))
    with (
        serve(engine, tracing=tracing, settings=ServerSettings(drain_s=0)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client, engine, tracing


PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_a_traced_request_has_the_phases_of_its_sequences(traced, spans):
    client, _, tracing = traced
    client.post(PATH, json=BODY | {"n": 2}, headers=PARENT)
    wait_until(lambda: any(s.name == f"POST {PATH}" for s in spans.get_finished_spans()))
    *phases, request = spans.get_finished_spans()
    assert format(request.context.trace_id, "032x") in PARENT["traceparent"]
    assert format(request.parent.span_id, "016x") in PARENT["traceparent"]
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["moeless.prompt_tokens"] == len(BODY["prompt"])
    names = sorted(span.name for span in phases)
    assert [name for name in names if name != "engine prefill"] == ["engine decode"] * 2 + [
        "engine queue"
    ] * 2
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert all(
        request.start_time <= s.start_time <= s.end_time <= request.end_time for s in phases
    )
    assert tracing.live == {}
    assert "private" not in str([dict(span.attributes) for span in spans.get_finished_spans()])


def test_a_request_that_fails_ends_its_trace(traced, spans):
    client, engine, tracing = traced
    engine.fail_after = 2
    assert client.post(PATH, json=BODY, headers=PARENT).status_code == 500
    wait_until(lambda: any(s.name == f"POST {PATH}" for s in spans.get_finished_spans()))
    assert not spans.get_finished_spans()[-1].status.is_ok
    assert tracing.live == {}


def test_requests_outside_the_sample_leave_no_span(traced, spans):
    client, _, tracing = traced
    assert client.post(PATH, json=BODY).status_code == 200
    assert client.post(PATH, json=BODY, headers={"traceparent": "nonsense"}).status_code == 200
    assert (spans.get_finished_spans(), tracing.live) == ((), {})


@pytest.mark.parametrize(
    "fields", [{"endpoint": "localhost"}, {"sample": 1.5}, {"every_steps": 0}]
)
def test_what_cannot_be_traced_is_refused(fields):
    with pytest.raises(ConfigError):
        TraceConfig(**({"endpoint": "http://x"} | fields))
