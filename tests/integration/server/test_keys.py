"""API keys."""

import logging

import httpx
import pytest

from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.server import ServerSettings

KEYS = ("first-key", "zweiter-schlüssel")
BODY = {"model": "fake/model", "prompt": "a very private prompt"}


@pytest.fixture(scope="module")
def url():
    with serve(FakeTextEngine(), settings=ServerSettings(api_keys=KEYS)) as server:
        yield server.url


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(url, key, scheme):
    headers = {"authorization": f"{scheme} {key}".encode()}
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer first", "Basic first-key", "first-key"]
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/nothing", "/moeless/experts", "/v1/completions"]
)
def test_anything_else_is_a_401(url, path, value):
    headers = {} if value is None else {"authorization": value}
    response = httpx.get(f"{url}{path}", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_probes_and_scrapers_need_no_key(url):
    for path in ("/health", "/metrics", "/openapi.json"):
        assert httpx.get(f"{url}{path}").status_code == 200


def test_neither_keys_nor_prompts_are_logged(url, caplog):
    caplog.set_level(logging.DEBUG)
    for key in (KEYS[0], "wrong-key"):
        headers = {"authorization": f"Bearer {key}"}
        httpx.post(f"{url}/v1/completions", json=BODY, headers=headers)
    ours = "\n".join(
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith(("httpcore", "httpx"))
    )
    assert "private" not in ours
    assert "key" not in ours
    assert KEYS[0] not in repr(ServerSettings(api_keys=KEYS))
