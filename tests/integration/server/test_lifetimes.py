"""Clients that leave, crowds, and the end of the server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from effort import PATIENCE_S, wait_until
from fakes.live_server import serve
from fakes.sse import parse_events, texts_by_index
from fakes.text_engine import FakeTextEngine
from moeless.errors import ConfigError
from moeless.server import ServerSettings, create_app, run_server

BODY = {"model": "fake/model", "prompt": "Hi"}


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_cancels_its_sequences(client, engine, n):
    engine.stall_after = 1
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "n": n}) as got:
        next(got.iter_lines())
    wait_until(lambda: len(engine.cancelled) == n)
    assert sorted(engine.cancelled) == sorted(r.request_id for r in engine.submitted)


def ask_and_hang_up(server, once: Callable[[], bool]) -> None:
    """A request whose client leaves as soon as something is so."""
    body = json.dumps(BODY).encode()
    with socket.create_connection((server.address.host, server.address.port)) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        leaving.sendall(b"Content-Type: application/json\r\n")
        leaving.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(once)


def test_leaving_before_the_answer_cancels_its_sequence(server, client, engine):
    engine.stall_after = 1
    ask_and_hang_up(server, once=lambda: len(engine.submitted) == 1)
    wait_until(lambda: engine.cancelled == [r.request_id for r in engine.submitted])


def test_leaving_while_the_prompt_is_encoded_submits_nothing(server, client, engine, caplog):
    def count_left() -> list[str]:
        lines = client.get("/metrics").text.splitlines()
        return [line for line in lines if 'path="/v1/completions",status_class="4xx"' in line]

    before = count_left()
    engine.encode_gate.clear()
    ask_and_hang_up(server, once=lambda: engine.encoding == 1)
    wait_until(lambda: count_left() != before)
    engine.encode_gate.set()
    assert client.post("/v1/completions", json=BODY | {"seed": 8}).status_code == 200
    assert [request.sampling.seed for request in engine.submitted] == [8]
    assert "unexpected" not in caplog.text


def test_leaving_while_sending_the_body_is_no_fault_of_the_server(server, client, caplog):
    before = client.get("/metrics").text.count("4xx")
    with socket.create_connection((server.address.host, server.address.port)) as leaving:
        leaving.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        leaving.sendall(b"Host: x\r\nContent-Length: 99\r\n\r\n{")
    wait_until(lambda: client.get("/metrics").text.count("4xx") > before)
    assert "unexpected" not in caplog.text


def test_a_body_that_never_ends_does_not_hold_up_the_end():
    with (
        serve(FakeTextEngine(), settings=ServerSettings(drain_s=0)) as server,
        httpx.Client(base_url=server.url) as client,
        socket.create_connection((server.address.host, server.address.port)) as sending,
    ):
        sending.settimeout(PATIENCE_S)
        sending.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        sending.sendall(b"Host: x\r\nContent-Length: 99\r\n\r\n{")
        wait_until(lambda: "requests_in_flight 2.0" in client.get("/metrics").text)
        server.should_exit = True
        assert sending.recv(1000).startswith(b"HTTP/1.1 503")


def test_a_sequence_that_ended_is_not_cancelled(complete, engine):
    assert complete().status_code == 200
    assert complete(stream=True).status_code == 200
    assert engine.cancelled == []


def test_a_client_that_does_not_read_is_ended_with_its_time():
    engine = FakeTextEngine(max_model_len=2_000_000)
    engine.natural_tokens = 1_500_000
    body = BODY | {"stream": True, "max_tokens": 1_500_000}
    with (
        serve(engine, settings=ServerSettings(request_timeout_s=0.5, drain_s=0)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body),
    ):
        wait_until(lambda: len(engine.cancelled) == 1)


def test_200_streams_at_once_all_get_their_answers(server, engine):
    engine.step_s = 0.005

    async def read_all():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE_S, limits=limits, trust_env=False
        ) as client:
            posts = [
                client.post("/v1/completions", json=BODY | {"stream": True, "seed": seed})
                for seed in range(200)
            ]
            return await asyncio.gather(*posts)

    responses = asyncio.run(read_all())
    expected = {r.sampling.seed: engine.answer_to(r)[0] for r in engine.submitted}
    assert len(expected) == 200
    for seed, response in enumerate(responses):
        assert response.status_code == 200
        assert texts_by_index(parse_events(response.text)) == {0: expected[seed]}
    assert engine.stats().running == 0


def test_a_slow_tokenizer_holds_up_nobody_else(client, engine):
    engine.encode_gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/completions", json=BODY)
        try:
            assert client.get("/health").status_code == 200
            ids = BODY | {"prompt": [72, 105]}
            assert client.post("/v1/completions", json=ids).status_code == 200
        finally:
            engine.encode_gate.set()
        assert waiting.result(PATIENCE_S).status_code == 200


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_open_streams_with_an_error_and_done(sent):
    tests = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("serve_fake.py"), "0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
    )
    try:
        url = process.stdout.readline().strip()
        with (
            httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
            ThreadPoolExecutor(1) as pool,
            client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream,
        ):
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY)
            lines = stream.iter_lines()
            first = next(lines)
            wait_until(lambda: client.get("/health").json()["running"] == 2)
            process.send_signal(sent)
            body = "\n".join([first, *lines]) + "\n"
            refused = whole.result(PATIENCE_S)
        process.wait(PATIENCE_S)
        assert parse_events(body)[-1]["error"]["code"] == "shutting_down"
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert process.returncode == 0, "the caller goes on and cleans up"
        assert process.stdout.read() == "cancelled 2\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_request_that_ends_while_draining_keeps_its_answer():
    engine = FakeTextEngine()
    engine.stall_after = 1
    with (
        serve(engine, settings=ServerSettings(drain_s=PATIENCE_S)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S
        )
        wait_until(lambda: engine.stats().running == 1)
        server.should_exit = True
        wait_until(lambda: not server.servers[0].is_serving())
        engine.stall_after = float("inf")
        assert answer.result(PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 70_000, "port 70000 does not exist"),
        ("no.such.host.invalid", 0, "host 'no.such.host.invalid' is unknown"),
        ("192.0.2.1", 0, "host 192.0.2.1 is not an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_bound_is_one_clear_line(host, port, message):
    app = create_app(FakeTextEngine(), settings=ServerSettings())
    with pytest.raises(ConfigError, match=message) as refused:
        run_server(app, host, port)
    assert "\n" not in str(refused.value)


def test_a_port_in_use_is_named(server):
    app = create_app(FakeTextEngine(), settings=ServerSettings())
    port = server.address.port
    with pytest.raises(ConfigError, match=f"port {port} is in use.*use --port"):
        run_server(app, "127.0.0.1", port)


def test_a_port_that_another_socket_holds_without_listening_is_in_use():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        app = create_app(FakeTextEngine(), settings=ServerSettings())
        with pytest.raises(ConfigError, match="is in use"):
            run_server(app, "127.0.0.1", held.getsockname()[1])
