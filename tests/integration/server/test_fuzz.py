"""Whatever the OpenAPI document allows or forbids is answered as it says."""

import httpx
import pytest

from fakes.busy_experts import BusyExperts
from fakes.fuzzing import fuzz
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.server import ApiKey, ServerSettings

pytestmark = pytest.mark.slow

BODY = {"model": "fake/model", "prompt": "Hi", "temperature": 0}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module", params=[False, True], ids=["open", "with keys"])
def fuzzed(request):
    settings = ServerSettings(api_keys=(ApiKey(name="a", secret="secret"),) * request.param)
    with serve(
        FakeTextEngine(),
        settings=settings,
        experts_snapshot=dict,
        live=BusyExperts(2, 4, 2).snapshot,
    ) as server:
        yield server.url, fuzz(server.url, examples=20, number=1, headers=KEY)


def test_no_request_of_any_operation_gets_an_unforeseen_answer(fuzzed):
    url, tally = fuzzed
    assert len(tally.statuses) == len(httpx.get(f"{url}/openapi.json").json()["paths"])
    for path in ("POST /v1/completions", "POST /v1/chat/completions"):
        assert {200, 400} <= tally.statuses[path].keys()
    answer = httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY)
    assert answer.json()["choices"][0]["text"] == FakeTextEngine().answer_to_prompt("Hi")
