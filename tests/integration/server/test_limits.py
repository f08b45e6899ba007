"""What each key may use."""

import httpx
import pytest

from effort import PATIENCE_S
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.server import ApiKey, KeyLimits, ServerSettings
from moeless.server.errors import ApiError
from moeless.server.limits import Account

BODY = {"model": "fake/model", "prompt": "Hi", "max_tokens": 5}
ALICE, BOB = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}


class ManualClock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return ManualClock()


def refusal(account):
    with pytest.raises(ApiError) as refused:
        account.enter()
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    return int(refused.value.headers["Retry-After"])


def test_requests_are_let_in_at_their_rate(clock):
    account = Account("a", KeyLimits(requests_per_minute=6), clock)
    for _ in range(6):
        account.enter()
    assert refusal(account) == 10
    clock.now_s += 4
    assert refusal(account) == 6
    clock.now_s += 6
    account.enter()
    assert refusal(account) == 10
    clock.now_s += 3600
    for _ in range(6):
        account.enter()
    refusal(account)
    assert account.requests == 13


def test_tokens_beyond_the_limit_are_waited_for(clock):
    account = Account("a", KeyLimits(tokens_per_minute=60), clock)
    account.enter()
    account.use_prompt(50)
    account.enter()
    account.use_generated(40)
    assert refusal(account) == 31
    clock.now_s += 31
    account.enter()
    assert (account.prompt_tokens, account.generated_tokens) == (50, 40)


def test_a_request_that_ended_makes_room_for_another(clock):
    account = Account("a", KeyLimits(concurrent=2), clock)
    account.enter()
    account.enter()
    assert refusal(account) == 1
    account.leave()
    account.enter()


def test_without_limits_nothing_is_refused(clock):
    account = Account("a", KeyLimits(), clock)
    for _ in range(1000):
        account.enter()
        account.use_prompt(10**9)


@pytest.fixture(scope="module")
def url():
    keys = (
        ApiKey(name="alice", secret="a"),
        ApiKey(name="bob", secret="b", limits=KeyLimits()),
    )
    limits = KeyLimits(requests_per_minute=3)
    with serve(
        FakeTextEngine(), settings=ServerSettings(api_keys=keys, key_limits=limits)
    ) as server:
        yield server.url


def test_one_key_s_limit_is_not_another_s(url):
    def post(headers, **fields):
        return httpx.post(f"{url}/v1/completions", json=BODY | fields, headers=headers)

    assert [post(ALICE).status_code for _ in range(3)] == [200] * 3
    refused = post(ALICE, stream=True)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "'alice' has used its 3 requests a minute" in refused.json()["error"]["message"]
    assert [post(BOB).status_code for _ in range(5)] == [200] * 5
    assert httpx.get(f"{url}/v1/models", headers=ALICE).status_code == 200


@pytest.mark.parametrize("ends", ["leaves", "fails"])
def test_however_a_request_ends_its_place_is_free_again(ends):
    engine = FakeTextEngine()
    settings = ServerSettings(key_limits=KeyLimits(concurrent=1), drain_s=0)
    with (
        serve(engine, settings=settings) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        if ends == "leaves":
            engine.stall_after = 1
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as open_:
                lines = open_.iter_lines()  # without a name it would end with its first line
                next(lines)
                assert client.post("/v1/completions", json=BODY).status_code == 429
            engine.stall_after = float("inf")
        else:
            engine.fail_after = 1
            assert client.post("/v1/completions", json=BODY).status_code == 500
            engine.fail_after = None
        while (response := client.post("/v1/completions", json=BODY)).status_code == 429:
            pass
        assert response.status_code == 200
