"""The admin socket: who is heard, what is answered, and that nothing sent there does harm."""

import contextlib
import json
import selectors
import shutil
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import PATIENCE_S, drawn
from moeless.errors import BudgetError, ConfigError, FunctionError
from moeless.functions.supervisor.admin import AdminDesk
from moeless.functions.supervisor.admin_client import AdminClient
from moeless.functions.supervisor.pool_directory import PoolDirectory
from moeless.functions.supervisor.pool_search import find_pool, running_pools


class FakeDevices:
    def __init__(self):
        self.asked = []

    def describe(self):
        return [{"device": 0, "state": "up"}]

    def add(self, kind, *, budget_bytes, cores):
        self.asked.append(("add", kind, budget_bytes, tuple(cores)))
        if kind == "tpu":
            raise ConfigError("'tpu' is not a device")
        return 2

    def drain(self, device):
        self.asked.append(("drain", device))
        if device == 9:
            raise BudgetError("the others hold 3 experts, a layer has 8")

    def keep(self, device):
        self.asked.append(("keep", device))
        if device == 7:
            raise ConfigError("device 7 is up")

    def set_budget(self, device, num_bytes):
        self.asked.append(("budget", device, num_bytes))
        if device == 8:
            raise FunctionError("it is busy")


class Models:
    def describe(self):
        return [{"model": "m", "state": "idle"}]


class Desk:
    """An admin desk whose loop runs in a thread."""

    def __init__(self, directory):
        self.path = directory / "admin.sock"
        self.devices = FakeDevices()
        self.selector = selectors.DefaultSelector()
        self.desk = AdminDesk(
            self.path, selector=self.selector, devices=self.devices, models=Models()
        )
        self.desk.open()
        self.running = True
        self.failure = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            while self.running:
                for key, _ in self.selector.select(0.02):
                    key.data()
        except BaseException as error:  # the test says what it was
            self.failure = error
            raise

    def close(self):
        self.running = False
        self.thread.join()
        self.desk.close()
        self.selector.close()
        assert self.failure is None

    def knock(self, data, *, fds=()):
        """Send bytes; returns what comes back, b"" if it hangs up."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(str(self.path))
            socket.send_fds(connection, [data], list(fds))
            return connection.recv(1 << 17)


@pytest.fixture(scope="module")
def folder():
    made = Path(tempfile.mkdtemp(prefix="moe-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def desk(folder):
    (folder / "moeless-a").mkdir(mode=0o700)
    made = Desk(folder / "moeless-a")
    yield made
    made.close()
    assert not made.path.exists()


def test_only_the_owner_can_reach_the_socket(desk):
    assert stat.S_IMODE(desk.path.stat().st_mode) == 0o600


def test_requests_are_carried_out_and_answered_one_by_one(desk):
    with AdminClient(desk.path) as admin:
        assert admin.list_devices() == [{"device": 0, "state": "up"}]
        assert admin.add("cpu", budget_bytes=100, cores=(0, 1)) == 2
        admin.drain(1)
        admin.keep(1)
        admin.set_budget(1, 512)
    assert desk.devices.asked[-4:] == [
        ("add", "cpu", 100, (0, 1)),
        ("drain", 1),
        ("keep", 1),
        ("budget", 1, 512),
    ]


def test_refusals_say_why_and_whether_the_request_was_wrong(desk):
    with AdminClient(desk.path) as admin:
        with pytest.raises(ConfigError, match="'tpu' is not a device"):
            admin.add("tpu")
        with pytest.raises(ConfigError, match="a layer has 8"):
            admin.drain(9)
        with pytest.raises(ConfigError, match="device 7 is up"):
            admin.keep(7)
        with pytest.raises(FunctionError, match="it is busy") as caught:
            admin.set_budget(8, 1)
        assert caught.value.exit_code == 1
        admin.drain(1)


def test_two_clients_at_once_are_both_answered(desk):
    with AdminClient(desk.path) as one, AdminClient(desk.path) as other:
        for _ in range(3):
            assert one.list_devices() == other.list_devices()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": None},
        {"op": []},
        {"op": "x" * 9000},
        {"op": "drain"},
        {"op": "drain", "device": "0"},
        {"op": "drain", "device": True},
        {"op": "drain", "device": -1},
        {"op": "drain", "device": 10**30},
        {"op": "budget", "device": 0},
        {"op": "budget", "device": 0, "budget_bytes": 0},
        {"op": "budget", "device": 0, "budget_bytes": 1.5},
        {"op": "add"},
        {"op": "add", "kind": 1},
        {"op": "add", "kind": "cpu", "cores": "0"},
        {"op": "add", "kind": "cpu", "cores": [None]},
        {"op": "add", "kind": "cpu", "cores": [], "budget_bytes": -1},
    ],
)
def test_what_is_malformed_is_refused_in_one_line(desk, message):
    asked = list(desk.devices.asked)
    answer = json.loads(desk.knock(json.dumps(message).encode()))
    assert answer["op"] == "refused"
    assert answer["exit_code"] == 2
    assert len(answer["error"]) < 300
    assert "\n" not in answer["error"]
    assert desk.devices.asked == asked


@pytest.mark.parametrize("data", [b"x", b"[]", b"\xff" * 100, b"[" * 20000, b'{"op":"list"'])
def test_who_sends_no_message_is_hung_up_on(desk, data):
    assert desk.knock(data) == b""
    with AdminClient(desk.path) as admin:
        assert admin.list_devices()


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@drawn(60)
@given(
    operation=st.sampled_from(["list", "add", "drain", "budget"]) | _values,
    fields=st.dictionaries(
        st.sampled_from(["device", "budget_bytes", "kind", "cores", "more"]), _values
    ),
)
def test_no_message_ends_the_desk(desk, operation, fields):
    answer = json.loads(desk.knock(json.dumps({"op": operation, **fields}).encode()))
    assert answer["op"] in ("done", "refused")


def test_descriptors_that_come_along_are_closed(desk):
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        desk.knock(b'{"op":"list"}', fds=[0, 1, 2])
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 1


def test_a_client_that_takes_no_answers_holds_up_nobody(desk):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.settimeout(0.2)
        deaf.connect(str(desk.path))
        with contextlib.suppress(OSError):
            for _ in range(2000):
                deaf.send(b'{"op":"list"}')
        with AdminClient(desk.path) as admin:
            assert admin.list_devices()


def test_so_many_connections_are_kept_and_no_more(desk):
    clients = [AdminClient(desk.path) for _ in range(16)]
    with pytest.raises(FunctionError), AdminClient(desk.path) as admin:
        admin.list_devices()
    for client in clients:
        client.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while desk.desk._connections:  # it has to notice
        assert time.monotonic() < deadline_s
    assert desk.knock(b'{"op":"list"}')


def test_the_only_pool_that_runs_is_found_and_several_have_to_be_named(desk, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    ours = PoolDirectory(desk.path.parent)
    found = [pool for pool in running_pools() if pool.path.parent == folder]
    assert found == [ours]

    (folder / "moeless-b").mkdir(mode=0o700)
    (folder / "moeless-c").mkdir(mode=0o755)
    for name in ("moeless-b", "moeless-c"):
        (folder / name / "admin.sock").touch()
    assert [pool for pool in running_pools() if pool.path.parent == folder] == [ours]

    (folder / "moeless-b" / "admin.sock").unlink()
    other = Desk(folder / "moeless-b")
    try:
        with pytest.raises(ConfigError, match=r"moeless-a.*moeless-b.*--pool DIR"):
            find_pool(None)
    finally:
        other.close()


def test_a_named_pool_must_be_one(folder):
    with pytest.raises(ConfigError, match="no pool is there"):
        find_pool(folder / "nothing")


def test_models_are_listed(desk):
    with AdminClient(desk.path) as admin:
        assert admin.list_models() == [{"model": "m", "state": "idle"}]
