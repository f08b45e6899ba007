"""Fixtures: one server for a module, an engine that is well at the start of each test."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import httpx  # noqa: E402 - the path to the fakes comes first
import pytest  # noqa: E402

from effort import PATIENCE_S  # noqa: E402
from fakes.live_server import serve  # noqa: E402
from fakes.text_engine import FakeTextEngine  # noqa: E402


@pytest.fixture(scope="module")
def shared_engine():
    return FakeTextEngine()


@pytest.fixture(scope="module")
def server(shared_engine):
    with serve(shared_engine) as running:
        yield running


@pytest.fixture
def engine(shared_engine):
    shared_engine.reset()
    yield shared_engine
    shared_engine.reset()


@pytest.fixture
def client(server, engine):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        yield http


@pytest.fixture
def chat(client):
    """Post a conversation with one turn of the user."""

    def post(**fields):
        body = {"model": "fake/model", "messages": [{"role": "user", "content": "Hi"}]}
        return client.post("/v1/chat/completions", json=body | fields)

    return post


@pytest.fixture
def complete(client):
    """Post a prompt."""

    def post(**fields):
        return client.post(
            "/v1/completions", json={"model": "fake/model", "prompt": "Hi"} | fields
        )

    return post
