"""Clients that are slow, idle, many or long-winded, against a real socket."""

import contextlib
import json
import socket

import httpx
import pytest

from effort import PATIENCE_S, wait_until
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.errors import ConfigError
from moeless.server import ApiKey, ServerSettings
from moeless.server.connections import ConnectionGuard

pytestmark = pytest.mark.slow

BODY = {"model": "fake/model", "prompt": "Hi", "max_tokens": 5}
FAST = ServerSettings(head_timeout_s=1.0, body_timeout_s=1.0, max_connections=50)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def fast():
    with serve(FakeTextEngine(), settings=FAST) as server:
        yield server


def connect(server):
    found = socket.create_connection((server.address.host, server.address.port))
    found.settimeout(PATIENCE_S)
    return contextlib.closing(found)


def read_all(connection):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            data += more
    return data


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return json.loads(body)["error"]


def drip(connection, data):
    """Send byte by byte, slowly but for ever; returns what came back when that was ended."""
    connection.settimeout(0.05)
    for byte in data * 100_000:
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1, socket.MSG_PEEK):
                break
            break
        try:
            connection.sendall(bytes([byte]))
        except OSError:
            break
    connection.settimeout(PATIENCE_S)
    return read_all(connection)


def ask(server):
    """Status of a request, once our own side of it was not too slow for the server's patience."""

    def answered():
        with contextlib.suppress(httpx.TransportError):
            return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S)

    return wait_until(answered).status_code


@pytest.mark.parametrize("first", [b"", b"G", HEAD], ids=["nothing", "a letter", "some headers"])
def test_a_client_that_sends_its_headers_too_slowly_is_left(fast, first):
    with connect(fast) as slow:
        slow.sendall(first)
        assert read_all(slow) == b""
    assert ask(fast) == 200


def test_headers_that_come_drop_by_drop_are_too_slow(fast):
    with connect(fast) as slow:
        assert drip(slow, HEAD + b"X-More: 1\r\n") == b""
    assert ask(fast) == 200


def test_the_second_request_of_a_connection_has_no_more_time(fast):
    with connect(fast) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")
        read = drip(slow, HEAD)
        assert read in {b"", b'{"status":"ok","running":0,"waiting":0}'}
    assert ask(fast) == 200


def test_a_body_that_comes_drop_by_drop_is_a_408(fast):
    with connect(fast) as slow:
        slow.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        answer = drip(slow, b" ")
    assert answer.startswith(b"HTTP/1.1 408")
    assert ask(fast) == 200


def test_a_body_that_nobody_wants_does_not_keep_a_connection(fast):
    with connect(fast) as slow:
        slow.sendall(HEAD.replace(b"completions", b"nothing") + b"Content-Length: 100000\r\n\r\n")
        assert drip(slow, b" ").startswith(b"HTTP/1.1 404")
    assert ask(fast) == 200


def test_idle_connections_make_room_for_those_that_ask(fast):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(fast)) for _ in range(200)]
        assert [ask(fast) for _ in range(5)] == [200] * 5
        assert len(fast.server_state.connections) <= FAST.max_connections + 1
        assert all(read_all(one) == b"" for one in idle)
    wait_until(lambda: not fast.server_state.connections)


def test_a_server_whose_connections_are_all_busy_says_so():
    engine = FakeTextEngine()
    engine.stall_after = 1
    settings = ServerSettings(max_connections=2, drain_s=0)
    request = json.dumps(BODY | {"stream": True}).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(request)
    with serve(engine, settings=settings) as server, connect(server) as a, connect(server) as b:
        for connection in (a, b):
            connection.sendall(head + request)
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
        with connect(server) as third:
            answer = read_all(third)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer.lower()
        assert error_of(answer)["code"] == "too_many_connections"


class ClosingConnection:
    """A connection that waits for its client to read the rest; its own transport, too."""

    waits_for_request, quiet_since_s, unread_bytes = True, 0.0, None
    left, aborted = 1000, False
    transport = property(lambda self: self)

    def is_closing(self):
        return True

    def get_write_buffer_size(self):
        return self.left

    def abort(self):
        self.aborted = True


def test_a_client_that_reads_slowly_gets_all_and_one_that_never_does_is_cut_off():
    guard, connection = ConnectionGuard(ServerSettings()), ClosingConnection()
    for second in range(100):
        connection.left -= 5
        guard.sweep([connection], float(second))
    assert not connection.aborted
    guard.sweep([connection], 109.0)
    assert not connection.aborted
    guard.sweep([connection], 110.0)
    assert connection.aborted


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Long: " + b"x" * 100_000,
        b"X-Long: " + b"x" * 17_000,
        b"\r\n".join(b"X-%d: 1" % i for i in range(101)),
        b"\r\n".join(b"X-%d: 1" % i for i in range(20_000)),
        b"Cookie: " + b"a=b; " * 50_000,
    ],
    ids=range(5),
)
def test_headers_that_are_too_long_or_too_many_are_a_431(fast, headers):
    with connect(fast) as client:
        with contextlib.suppress(OSError):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 431"), answer[:100]
    assert error_of(answer)["code"] == "headers_too_large"
    assert ask(fast) == 200


def test_a_path_that_never_ends_is_refused(fast):
    response = httpx.get(f"{fast.url}/v1/models/{'x' * 17_000}")
    assert response.status_code == 431
    assert ask(fast) == 200


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"],
)
def test_what_is_not_http_is_a_400(fast, garbage):
    with connect(fast) as client:
        client.sendall(garbage)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 400")
    assert error_of(answer)["code"] == "invalid_http"
    assert ask(fast) == 200


def test_garbage_after_an_answer_has_begun_ends_the_connection(fast, caplog):
    with connect(fast) as client:
        client.sendall(HEAD.replace(b"completions", b"no") + b"Transfer-Encoding: chunked\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 404")
        client.sendall(b"nonsense\r\n\r\n")
        assert not read_all(client).startswith(b"HTTP")
    assert ask(fast) == 200
    assert "Fatal error" not in caplog.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://{host}", 200),
        ("https://{host}", 200),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_sites_are_refused(fast, origin, status):
    host = fast.url.removeprefix("http://")
    headers = {} if origin is None else {"origin": origin.format(host=host)}
    response = httpx.post(f"{fast.url}/v1/completions", json=BODY, headers=headers)
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "cross_origin"


@pytest.fixture(scope="module")
def welcoming():
    settings = ServerSettings(
        api_keys=(ApiKey(name="a", secret="secret"),),
        allow_origins=("https://chat.example", "http://LOCALHOST:3000"),
    )
    with serve(FakeTextEngine(), settings=settings) as server:
        yield server


@pytest.mark.parametrize("origin", ["https://chat.example", "http://localhost:3000"])
def test_pages_of_a_site_that_is_allowed_can_send_requests_and_read_all_answers(welcoming, origin):
    url, headers = f"{welcoming.url}/v1/completions", {"origin": origin}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    before = httpx.request("OPTIONS", url, headers=headers | asked)
    assert before.status_code == 200, "browsers ask without the key"
    assert (
        before.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    )
    for key, status in (("secret", 200), ("wrong", 401)):
        sent = headers | {"authorization": f"Bearer {key}"}
        answer = httpx.post(url, json=BODY, headers=sent)
        assert answer.status_code == status
        for response in (before, answer):
            assert response.headers["access-control-allow-origin"] == origin
            assert "origin" in response.headers["vary"].lower()


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", "https://chat.example:444", "null"]
)
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "POST"])
def test_that_one_site_is_allowed_opens_no_door_for_others(welcoming, origin, method):
    headers = {
        "origin": origin,
        "authorization": "Bearer secret",
        "access-control-request-method": "POST",
    }
    response = httpx.request(method, f"{welcoming.url}/v1/models", headers=headers)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example", "https://chat.example/", "https://*.example", ""]
)
def test_what_is_no_origin_cannot_be_allowed(origin):
    with pytest.raises(ConfigError, match="is not an origin"):
        ServerSettings(allow_origins=(origin,))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("[", 403),
    ],
)
def test_a_server_without_keys_answers_to_local_names_only(host, status):
    with serve(FakeTextEngine(), settings=ServerSettings(local_names_only=True)) as server:
        response = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert response.status_code == status
