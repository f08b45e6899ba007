"""A supervisor and those who knock at its socket, wanted or not."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moeless.errors import FunctionError
from moeless.functions.links.channel import ChannelShape
from moeless.functions.links.wire import layout_to_json, spec_to_json
from moeless.functions.supervisor.client import SupervisorClient


@pytest.fixture(scope="module")
def served(serve, reference):
    return serve(reference[0])


@pytest.fixture
def path(served):
    return served.runtime.supervisor.socket_path


def make_shape(spec):
    return ChannelShape(
        max_rows=8,
        max_assignments=16,
        hidden=spec.expert.hidden,
        dtype=spec.expert.dtype,
        num_experts=spec.num_experts,
    )


def attach_request(served, **changes):
    loaded = served.loaded
    return {
        "op": "attach",
        "spec": spec_to_json(loaded.spec),
        "layout": layout_to_json(loaded.layout),
        "directory": str(loaded.directory),
        "shape": make_shape(loaded.spec).to_json(),
        "lookahead": 0,
    } | changes


def knock(path, data):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect(path)
        connection.send(data)
        return connection.recv(1 << 17)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"[]",
        b"{}",
        b'{"op":"demand","ticket":1,"layer":0,"experts":[0]}',
        b'{"op":"attach"}',
        b'{"op":"attach","spec":7}',
        b"[" * 100_000,
        b"\x00" * 100_000,
    ],
    ids=lambda data: repr(data[:24]),
)
def test_garbage_is_refused(served, path, data):
    answer = json.loads(knock(path, data))
    assert answer["op"] == "refused"
    assert answer["error"]
    assert served.client.report()["worker_restarts"] == [0, 0]


@pytest.mark.parametrize("field", ["spec", "layout", "directory", "shape", "lookahead"])
def test_a_request_without_a_field_is_refused_before_anything_is_done(served, path, field):
    request = attach_request(served)
    del request[field]
    answer = json.loads(knock(path, json.dumps(request).encode()))
    assert answer["op"] == "refused"
    assert field in answer["error"]


def test_many_who_knock_and_say_nothing_do_not_hurt(served, path, tokens_of, expected):
    silent = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(path)
        silent.append(connection)
    assert tokens_of(served.model) == expected
    for connection in silent:
        connection.close()
    assert tokens_of(served.model) == expected
    assert served.client.report()["worker_restarts"] == [0, 0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_even_if_the_socket_lets_him_in(
    served, path, tokens_of, expected
):
    socket_path = Path(path)
    opened = [socket_path.parent, socket_path.parent.parent]
    code = (
        "import os, socket, sys; os.setuid(65534); "
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(30); "
        "s.connect(sys.argv[1]); s.send(b'{}') if len(sys.argv) > 2 else None; "
        "print(repr(s.recv(100)))"
    )
    try:
        for directory in opened:
            directory.chmod(0o711)
        socket_path.chmod(0o666)
        result = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60
        )
    finally:
        socket_path.chmod(0o600)
        for directory in opened:
            directory.chmod(0o700)
    assert result.stdout.strip() == "b''", result.stderr
    assert tokens_of(served.model) == expected


def test_an_engine_that_left_makes_room_for_the_next_and_its_instances_stay_warm(
    serve, reference, wait_until
):
    served = serve(reference[0])
    path, loaded = served.runtime.supervisor.socket_path, served.loaded
    wait_until(lambda: served.client.board.warm_LED.any(axis=2).all())
    warm_LED = served.client.board.warm_LED.copy()
    served.client.announce_loads()
    served.client.close()
    arguments = {
        "spec": loaded.spec,
        "layout": loaded.layout,
        "shape": make_shape(loaded.spec),
        "lookahead": 0,
    }

    client = SupervisorClient(path, directory=loaded.directory, **arguments)
    assert (client.board.warm_LED == warm_LED).all()
    report = client.report()
    assert sum(report["resident_bytes_D"]) == 24 * client.function_bytes
    assert report["cold_starts_L"] == [0, 0, 0], "what was before is on nobody's bill twice"
    client.close()
    with pytest.raises(FunctionError, match=r"is known here from .* serve it under another"):
        SupervisorClient(path, directory=loaded.directory.parent, **arguments)
    served.runtime.supervisor.close()
