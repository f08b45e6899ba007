"""Whatever clients do to a real server, the next normal request gets the same answer."""

import asyncio
import json

import httpx
import pytest

from effort import PATIENCE_S

CHAT = "/v1/chat/completions"
MODEL = "tiny-granite"


def chat(**fields):
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12} | fields


BAD = {
    "bad JSON": (b"{", 400),
    "invalid UTF-8": (b'{"model": "\xff"}', 400),
    "an unknown field": (json.dumps(chat(temprature=1)).encode(), 400),
    "a wrong type": (json.dumps(chat(max_tokens="5")).encode(), 400),
    "no tokens": (json.dumps(chat(max_tokens=0)).encode(), 400),
    "fewer than no tokens": (json.dumps(chat(max_tokens=-3)).encode(), 400),
    "a billion tokens": (json.dumps(chat(max_tokens=10**9)).encode(), 400),
    "an over-long prompt": (
        json.dumps(chat(messages=[{"role": "user", "content": "word " * 100_000}])).encode(),
        400,
    ),
    "no messages": (json.dumps(chat(messages=[])).encode(), 400),
    "a thousand stops": (json.dumps(chat(stop=["x"] * 1000)).encode(), 400),
    "an unknown model": (json.dumps(chat(model="gpt-9")).encode(), 404),
}


@pytest.fixture(scope="module")
def normal(serving):
    """The answer to a normal request, before anything bad happens."""
    return answer(serving)


def answer(server) -> str:
    response = httpx.post(f"{server.url}{CHAT}", json=chat(), timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def post_many(server, bodies):
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:
        headers = {"content-type": "application/json"}
        posts = (client.post(CHAT, content=body, headers=headers) for body in bodies)
        return [response.status_code for response in await asyncio.gather(*posts)]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_once_and_32_at_a_time(serving, normal, name):
    body, status = BAD[name]
    assert asyncio.run(post_many(serving, [body])) == [status]
    assert asyncio.run(post_many(serving, [body] * 32)) == [status] * 32
    assert answer(serving) == normal


def test_an_empty_prompt_to_completions(serving, normal):
    body = {"model": MODEL, "prompt": ""}
    response = httpx.post(f"{serving.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert answer(serving) == normal


def test_clients_that_leave_in_mid_stream(serving, normal):
    async def leave(client):
        body = chat(stream=True, max_tokens=200, ignore_eos=True)
        async with client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                return

    async def all_leave():
        async with httpx.AsyncClient(base_url=serving.url, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(leave(client) for _ in range(32)))

    asyncio.run(all_leave())
    assert answer(serving) == normal


@pytest.mark.slow
def test_200_streams_at_once_all_end_well(serving, normal):
    async def read(client):
        text, done = [], False
        async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text.append(delta.get("content") or "")
        return "".join(text), done

    async def read_all():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=serving.url, timeout=PATIENCE_S, limits=limits
        ) as client:
            return await asyncio.gather(*(read(client) for _ in range(200)))

    answers = asyncio.run(read_all())
    assert answers == [(normal, True)] * 200
    assert answer(serving) == normal


def test_the_snapshot_and_the_metrics_agree_on_what_the_experts_did(serving, normal):
    assert normal == answer(serving)
    snapshot = httpx.get(f"{serving.url}/moeless/experts").json()
    assert snapshot["model"] == MODEL
    assert snapshot["layers"] == len(snapshot["tokens"])
    assert all(sum(tokens) > 0 for tokens in snapshot["tokens"])
    assert snapshot["plans"] > 0
    assert snapshot["forecast_s"]["count"] > 0
    lines = httpx.get(f"{serving.url}/metrics").text.splitlines()
    served = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    assert "moeless_expert_tokens_total" in served
    assert "moeless_billed_gb_seconds_total" in served
    cold = [line for line in lines if line.startswith("moeless_function_cold_starts_total")]
    assert int(float(cold[0].rsplit(" ", 1)[1])) == snapshot["cold_starts"] > 0
