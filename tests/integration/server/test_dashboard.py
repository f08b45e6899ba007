"""The dashboard's page and its data, without a browser."""

import base64
import gzip
import hashlib
import json
import re
from importlib import resources

import httpx
import numpy as np
import pytest

from fakes.busy_experts import BusyExperts
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.errors import FunctionError
from moeless.server import ApiKey, ServerSettings
from moeless.server.live import pack
from moeless.server.metrics import TokenRate

VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
FOLDER = resources.files("moeless.server") / "dashboard"


@pytest.fixture(scope="module")
def busy():
    return BusyExperts(6, 300, 2)


@pytest.fixture(scope="module")
def url(busy):
    with serve(FakeTextEngine(), live=busy.snapshot) as server:
        yield server.url


def files():
    return sorted(file.name for file in FOLDER.iterdir() if file.is_file())


def unpacked(packed):
    raw = base64.b64decode(packed["base64"])
    return np.frombuffer(raw, dtype=packed["type"]).reshape(packed["shape"])


@pytest.mark.parametrize("name", files())
def test_every_file_of_the_page_comes_with_a_strict_policy(url, name):
    response = httpx.get(f"{url}/dashboard/{name}")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content == (FOLDER / name).read_bytes()


def test_the_page_loads_nothing_from_elsewhere_and_has_no_script_or_style_inside(url):
    page = httpx.get(f"{url}/dashboard").text
    wanted = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert all(target.startswith(("/dashboard/", "#")) for target in wanted)
    for target in wanted:
        if not target.startswith("#"):
            assert httpx.get(f"{url}{target}").status_code == 200
    assert re.findall(r"<script(?![^>]*src=)|<style| style=| on\w+=", page) == []
    for name in files():
        text = (FOLDER / name).read_text("utf-8")
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == [], name
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in files()


@pytest.mark.parametrize("name", VENDORED)
def test_the_chart_library_is_the_one_that_was_pinned(name):
    assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == VENDORED[name]


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "../keys.py",
        "..%2fkeys.py",
        "vendor/../../app.py",
        "vendor/uPlot.LICENSE",
    ],
)
def test_nothing_else_is_served(url, name):
    assert httpx.get(f"{url}/dashboard/{name}").status_code == 404


def test_the_state_is_compact_and_has_what_the_experts_have(url, busy):
    state = httpx.get(f"{url}/moeless/live").json()
    assert (state["model"], state["layers"], state["experts"]) == ("busy/model", 6, 300)
    tokens = unpacked(state["tokens"])
    assert tokens.shape == (6, 300)
    later = busy.snapshot()
    assert (tokens <= later.tokens_LE).all()
    assert (unpacked(state["replicas"]) == later.replicas_LED.sum(axis=2)).all()
    assert state["static_sum"] == pytest.approx([1.37 * n for n in state["layer_steps"]])
    assert state["requests"]["running"] == 0


def test_requests_show_in_the_state():
    with serve(FakeTextEngine(), live=BusyExperts(2, 4, 1).snapshot) as server:
        body = {"model": "fake/model", "prompt": "Hi", "max_tokens": 5}
        httpx.post(f"{server.url}/v1/completions", json=body)
        found = httpx.get(f"{server.url}/moeless/live").json()["requests"]
    assert (found["prompt_tokens"], found["generated_tokens"]) == (2, 5)
    assert found["tokens_per_second"] > 0
    assert (found["ttft"]["count"], found["tpot"]["count"], found["duration"]["count"]) == (
        1,
        1,
        1,
    )


def test_the_rate_is_the_mean_of_the_newest_seconds_from_the_first_token_on():
    now = [1000.25]
    rate = TokenRate(lambda: now[0])
    assert rate.per_second() == 0
    rate.add(30)
    assert rate.per_second() == 30, "a server that has just begun"
    for _ in range(20):
        now[0] += 1
        rate.add(30)
    assert rate.per_second() == pytest.approx(5 * 30 / 4.25)
    now[0] += 4
    assert 0 < rate.per_second() < 10
    now[0] += 1
    assert rate.per_second() == 0


def test_one_layer_is_shown_in_detail(url):
    detail = httpx.get(f"{url}/moeless/live?layer=3").json()["detail"]
    assert (detail["layer"], len(detail["expected"]), len(detail["actual"])) == (3, 300, 300)
    assert httpx.get(f"{url}/moeless/live?layer=0").json()["detail"]["expected"] is None


@pytest.mark.parametrize("layer", ["6", "-1", "x", "1" * 500, "\u00b2", ""])
def test_a_layer_that_does_not_exist_has_no_detail(url, layer):
    response = httpx.get(f"{url}/moeless/live", params={"layer": layer})
    assert response.status_code == 200
    assert response.json()["detail"] is None


def test_a_large_state_is_compressed_for_those_who_can_read_it(url):
    with httpx.stream("GET", f"{url}/moeless/live", headers={"accept-encoding": "gzip"}) as got:
        raw = b"".join(got.iter_raw())
    assert got.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(raw))["layers"] == 6
    plain = httpx.get(f"{url}/moeless/live", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(plain.content) > len(raw)


def test_counts_wrap_around_so_that_differences_stay_right():
    before, after = np.array([2**32 - 3]), np.array([2**32 + 4])
    small = [int(unpacked(pack(values, np.uint32))[0]) for values in (before, after)]
    assert (small[1] - small[0]) % 2**32 == 7


def test_viewers_share_a_snapshot():
    asked = []
    busy = BusyExperts(2, 4, 1)

    def take():
        asked.append(1)
        return busy.snapshot()

    with serve(FakeTextEngine(), live=take) as server, httpx.Client() as client:
        first = client.get(f"{server.url}/moeless/live").json()
        others = [client.get(f"{server.url}/moeless/live").json() for _ in range(20)]
    assert len(asked) < 20
    assert others[0]["time_s"] == first["time_s"] or len(asked) > 1


def test_the_page_is_open_and_its_data_asks_for_the_key():
    settings = ServerSettings(api_keys=(ApiKey(name="a", secret="secret"),))
    with serve(FakeTextEngine(), settings=settings, live=BusyExperts(2, 4, 1).snapshot) as server:
        assert httpx.get(f"{server.url}/dashboard").status_code == 200
        assert httpx.get(f"{server.url}/moeless/live").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/moeless/live", headers=headers).status_code == 200


def test_experts_that_do_not_answer_are_a_503_and_none_at_all_a_404():
    def take():
        raise FunctionError("the supervisor is gone")

    with serve(FakeTextEngine(), live=take) as server:
        response = httpx.get(f"{server.url}/moeless/live")
        assert response.status_code == 503
        assert "the supervisor is gone" in response.json()["error"]["message"]
    with serve(FakeTextEngine()) as server:
        assert httpx.get(f"{server.url}/moeless/live").status_code == 404
