"""Messages over a real socket pair, whole, cut and malformed."""

import array
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from effort import PATIENCE_S
from moeless.errors import FunctionError
from moeless.functions.links.messages import MAX_BYTES, MAX_FDS, close_all, peer_uid, receive, send


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    theirs.settimeout(10)
    with ours, theirs:
        yield ours, theirs


def open_fds():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@contextlib.contextmanager
def no_descriptor_left():
    before = open_fds()
    yield
    assert open_fds() == before


@contextlib.contextmanager
def a_pipe():
    ends = os.pipe()
    yield ends
    close_all(ends)


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    sent = [{"op": "a", "list": [1, 2.5, None, "ü\n"]}, {"op": "b"}, {}]
    for message in sent:
        send(ours, message)
    assert [receive(theirs) for _ in sent] == [(message, []) for message in sent]


def test_descriptors_travel_along(pair):
    ours, theirs = pair
    with a_pipe() as (reader, writer):
        send(ours, {"op": "take"}, fds=[writer])
        _, fds = receive(theirs)
        os.write(fds[0], b"through the other number")
        close_all(fds)
        assert os.read(reader, 100) == b"through the other number"


def test_as_many_descriptors_as_the_kernel_allows_travel_at_once(pair):
    ours, theirs = pair
    with no_descriptor_left(), a_pipe() as (reader, _):
        send(ours, {}, fds=[reader] * MAX_FDS)
        _, fds = receive(theirs)
        assert len(fds) == MAX_FDS
        close_all(fds)
        with pytest.raises(FunctionError, match="too large"):
            send(ours, {"op": "many"}, fds=[reader] * (MAX_FDS + 1))


def test_the_largest_message_passes_and_one_byte_more_is_refused(pair):
    ours, theirs = pair
    empty = len('{"pad":""}')
    send(ours, {"pad": "x" * (MAX_BYTES - empty)})
    message, _ = receive(theirs)
    assert len(message["pad"]) == MAX_BYTES - empty
    with pytest.raises(FunctionError, match=f"'big' of {MAX_BYTES + 21} bytes is too large"):
        send(ours, {"op": "big", "pad": "x" * MAX_BYTES})


def test_a_closed_connection_is_none(pair):
    ours, theirs = pair
    ours.close()
    assert receive(theirs) is None


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b'{"op": ',
        b"[" * 100_000,
        b'{"pad": "' + b"x" * MAX_BYTES + b'"}',
        b" " * MAX_BYTES + b"{}",
        b"{}" + b" " * MAX_BYTES,
    ],
    ids=lambda data: f"{data[:9]!r}-{len(data)}",
)
def test_what_is_not_a_message_is_refused_and_its_descriptors_closed(pair, data):
    ours, theirs = pair
    with no_descriptor_left(), a_pipe() as (reader, writer):
        socket.send_fds(ours, [data], [reader, writer])
        with pytest.raises(FunctionError, match="received"):
            receive(theirs)
    send(ours, {"op": "next"})
    assert receive(theirs) == ({"op": "next"}, [])


def test_an_empty_packet_counts_as_the_end_and_leaks_no_descriptor(pair):
    ours, theirs = pair
    with no_descriptor_left(), a_pipe() as (reader, _):
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader]))]
        ours.sendmsg([b""], control)
        assert receive(theirs) is None


def test_sending_to_one_who_is_gone_is_an_os_error(pair):
    ours, theirs = pair
    theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        send(ours, {"op": "hello"})


def test_the_peers_user_is_known(pair):
    assert peer_uid(pair[0]) == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_told_apart(tmp_path):
    tmp_path.chmod(0o711)
    everybodys = Path(tempfile.gettempdir())
    for parent in tmp_path.parents:
        if everybodys in parent.parents and parent.stat().st_uid == os.getuid():
            parent.chmod(0o711)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        listener.settimeout(10)
        code = (
            "import os, socket, sys; os.setuid(65534); "
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
            "s.connect(sys.argv[1]); s.recv(1)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(path)])
        with listener.accept()[0] as connection:
            assert peer_uid(connection) == 65534
        child.wait(timeout=PATIENCE_S)


def test_closing_what_is_closed_does_not_matter():
    reader, writer = os.pipe()
    close_all([reader, writer, reader])
