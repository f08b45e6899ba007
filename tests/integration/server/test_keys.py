"""API keys."""

import logging
import os

import httpx
import pytest

from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.errors import ConfigError
from moeless.server import ApiKey, KeyLimits, ServerSettings, read_key_file

KEYS = ("first-key", "zweiter-schlüssel")
NAMED = tuple(ApiKey(name=f"key-{i}", secret=secret) for i, secret in enumerate(KEYS))
BODY = {"model": "fake/model", "prompt": "a very private prompt"}


@pytest.fixture(scope="module")
def url():
    with serve(FakeTextEngine(), settings=ServerSettings(api_keys=NAMED)) as server:
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
    assert KEYS[0] not in repr(ServerSettings(api_keys=NAMED)) + repr(NAMED)


def write_keys(path, text, mode=0o600):
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_of_keys_has_names_and_limits(tmp_path):
    text = "# ours\n\nalice:secret:1\nbob:x concurrent=2 tokens_per_minute=50\n"
    alice, bob = read_key_file(write_keys(tmp_path / "keys", text))
    assert (alice.name, alice.secret, alice.limits) == ("alice", "secret:1", None)
    assert bob.limits == KeyLimits(concurrent=2, tokens_per_minute=50)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    path = write_keys(tmp_path / "keys", "alice:secret", mode)
    with pytest.raises(ConfigError, match="run chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice", "no colon"),
        (":hidden", "the name ''"),
        ("alice:", "an API key is empty"),
        ("anonymous:hidden", "cannot be that of a key"),
        ("alice:hidden hidden", "after the key only requests_per_minute=N"),
        ("alice:hidden concurrent=-1", "after the key only"),
        ("alice:hidden concurrent=0", "concurrent is 0"),
    ],
)
def test_a_wrong_line_is_named_without_its_key(tmp_path, line, reason):
    path = write_keys(tmp_path / "keys", f"bob:fine\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}") as refused:
        read_key_file(path)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("text", [b"# none\n", b"\xff:\xff\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    path = write_keys(tmp_path / "keys", "")
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=os.fspath(path)):
        read_key_file(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([("a", "x"), ("a", "y")], "two API keys have the name 'a'"),
        ([("a", "x"), ("b", "x")], "'a' and 'b' are the same"),
    ],
)
def test_keys_must_differ(keys, message):
    with pytest.raises(ConfigError, match=message):
        ServerSettings(api_keys=tuple(ApiKey(name=name, secret=s) for name, s in keys))
