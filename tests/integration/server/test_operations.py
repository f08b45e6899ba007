"""Models, health, metrics, experts and the API's own description."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.errors import ConfigError
from moeless.server import ApiKey, ServerSettings


def sample(text, name, **labels):
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    return None


def test_the_model_is_listed_and_found_by_its_id(client):
    listed = client.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert model["id"] == "fake/model"
    assert model["object"] == "model"
    assert client.get("/v1/models/fake/model").json() == model


PATHS = ["/health", "/v1/models", "/v1/models/fake/model", "/metrics", "/openapi.json"]
PATHS += ["/dashboard", "/dashboard/main.js", "/moeless/experts"]


@pytest.fixture(scope="module")
def watched():
    with (
        serve(FakeTextEngine(), experts_snapshot=lambda: {"layers": []}) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_whatever_can_be_got_answers_probes_that_ask_for_its_head(watched, path):
    got, head = watched.get(path), watched.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # which has counted the first request
        assert head.headers["content-length"] == got.headers["content-length"]


def test_the_head_of_what_cannot_be_got_is_refused_as_getting_it(watched):
    assert watched.head("/nowhere").status_code == 404
    assert watched.head("/v1/completions").status_code == 405
    assert watched.post("/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", PATHS)
def test_a_slash_at_the_end_of_a_path_changes_nothing(watched, path):
    plain, slashed = watched.get(path), watched.get(f"{path}/")
    assert slashed.status_code == 200
    assert slashed.headers["content-type"] == plain.headers["content-type"]
    if path != "/metrics":
        assert slashed.content == plain.content


def test_prompts_may_be_sent_to_a_path_with_a_slash(client):
    body = {"model": "fake/model", "prompt": "Hi"}
    assert client.post("/v1/completions/", json=body).status_code == 200


def test_who_opens_the_server_in_a_browser_sees_the_dashboard(client):
    response = client.get("/", follow_redirects=True)
    assert response.url.path == "/dashboard"
    assert "<html" in response.text


def test_health_tells_the_queue(client):
    assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_requests_and_tokens_are_counted():
    with (
        serve(FakeTextEngine(), metrics_text=lambda: b"moeless_extra 7") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        body = {"model": "fake/model", "prompt": "Hi", "max_tokens": 5}
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json=body | {"n": 0})
        client.get("/nowhere/1")
        client.get("/nowhere/2")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text, path = response.text, "/v1/completions"
    assert sample(text, "moeless_http_requests_total", path=path, status_class="2xx") == 1
    assert sample(text, "moeless_http_requests_total", path=path, status_class="4xx") == 1
    assert sample(text, "moeless_http_requests_total", path="other") == 2
    assert sample(text, "moeless_http_requests_in_flight") == 1
    assert sample(text, "moeless_prompt_tokens_total") == 2
    assert sample(text, "moeless_generated_tokens_total") == 5
    assert sample(text, "moeless_time_to_first_token_seconds_count", path=path) == 1
    assert sample(text, "moeless_inter_token_latency_seconds_count", path=path) == 4
    assert sample(text, "moeless_request_duration_seconds_count", outcome="finished") == 1
    assert sample(text, "moeless_engine_running_requests") == 0
    assert sample(text, "moeless_extra") == 7


def test_two_applications_do_not_share_counters(client):
    with serve(FakeTextEngine()) as other:
        httpx.get(f"{other.url}/health")
        text = httpx.get(f"{other.url}/metrics").text
    assert sample(text, "moeless_http_requests_total", path="/health") == 1


def test_the_experts_are_shown_where_there_are_some():
    snapshot = {"layers": [{"layer": 0, "experts": [{"state": "WARM"}]}]}
    with serve(FakeTextEngine(), experts_snapshot=lambda: snapshot) as server:
        assert httpx.get(f"{server.url}/moeless/experts").json() == snapshot


def test_the_description_holds_the_bodies_that_are_really_checked(client):
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, name in (
        ("/v1/completions", "CompletionBody"),
        ("/v1/chat/completions", "ChatBody"),
    ):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["additionalProperties"] is False
        assert "422" not in operation["responses"]
    assert {"model", "messages"} <= set(schemas["ChatBody"]["required"])
    assert "anyOf" in schemas["CompletionBody"]["properties"]["prompt"]
    assert schemas["ChatMessage"]["properties"]["role"]["enum"][0] == "system"


def test_the_description_says_who_is_served_and_whether_a_key_is_needed(client):
    document = client.get("/openapi.json").json()
    model = document["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert model["enum"] == ["fake/model"]
    assert "securitySchemes" not in document["components"]
    settings = ServerSettings(api_keys=(ApiKey(name="a", secret="secret"),))
    with serve(FakeTextEngine(), settings=settings) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    secured = [
        path
        for path, found in document["paths"].items()
        for op in found.values()
        if "security" in op
    ]
    assert secured == [
        path for path in document["paths"] if path.startswith(("/v1/", "/moeless/"))
    ]


def test_every_answer_of_the_description_has_a_shape(client):
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if (path, status) != ("/moeless/experts", "200"):
                    assert all(kind["schema"] for kind in answer["content"].values()), status


@pytest.mark.parametrize(
    "fields", [{"max_n": 0}, {"head_timeout_s": 0}, {"drain_s": -1}, {"max_logprobs": -1}]
)
def test_settings_that_make_no_sense_are_refused(fields):
    with pytest.raises(ConfigError):
        ServerSettings(**fields)
