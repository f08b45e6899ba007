"""``moeless devices`` while somebody else changes his mind."""

import importlib
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from moeless.cli import devices
from moeless.errors import FunctionError

pytestmark = pytest.mark.slow


class Admin:
    """A pool whose device goes through some states, one each time somebody looks."""

    def __init__(self, *states):
        self.states = list(states)
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def drain(self, device):
        self.asked.append(("drain", device))

    def keep(self, device):
        self.asked.append(("keep", device))

    def list_devices(self):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [{"device": 0, "state": state, "instances": 1}]


@pytest.fixture
def run(monkeypatch):
    def run(admin, *arguments):
        monkeypatch.setattr(devices, "_connect", lambda _: admin)
        monkeypatch.setattr(devices, "_LOOK_EVERY_S", 0.0)
        return CliRunner().invoke(devices.devices, arguments)

    return run


def test_who_waits_for_a_device_to_drain_is_told_that_it_was_taken_back(run):
    result = run(Admin("draining", "draining", "up"), "drain", "0")
    assert isinstance(result.exception, FunctionError)
    assert "draining it was taken back" in str(result.exception)


def test_who_waits_for_a_device_to_drain_is_told_its_end(run):
    result = run(Admin("draining", "drained"), "drain", "0")
    assert result.exit_code == 0
    assert "device 0 is drained" in result.output


GPU = {
    "device": 13,
    "label": "cuda:13",
    "state": "starting",
    "pid": 4194303,
    "budget_bytes": 999_900_000_000,
    "held_bytes": 123_400_000_000,
    "instances": 123_456,
    "restarts": 1234,
    "speed": 0.25,
    "note": "",
}


class Fleet:
    def __init__(self, *found):
        self.found = list(found)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def list_devices(self):
        return self.found


def test_a_list_of_devices_fits_eighty_columns_and_every_column_has_its_whole_name(run):
    long = "ended at once: " + "cannot allocate memory, " * 8
    free = GPU | {"device": 14, "state": "down"}
    result = run(Fleet(GPU, GPU | {"device": 15, "state": "down", "note": long}, free), "list")
    head, first, second, *notes = result.output.splitlines()
    assert max(len(head), len(first), len(second)) <= 80
    assert head.split() == [
        "device",
        "kind",
        "state",
        "pid",
        "budget",
        "held",
        "instances",
        "restarts",
    ]
    assert first.split("  ")[-1].strip() == "1234"
    assert notes == [
        "device 13: slow: 1/4 of the others",
        f"device 15: {long}",
        "2 more can join",
    ]
    for column in ("device", "pid", "budget", "held", "instances", "restarts"):
        end = head.index(column) + len(column)
        assert first[end - 1] != " ", f"{column} stands over its numbers"


def test_a_list_of_models_shows_whole_names(run, monkeypatch):
    model = {
        "model": "Qwen3-235B-A22B-Instruct-2507-and-more-words-than-a-terminal-has-room-for-today",
        "state": "busy",
        "engines": 2,
        "share": "25%",
        "guaranteed_bytes": 10**9,
        "held_bytes": 10**9,
        "instances": 7,
    }
    pool_module = importlib.import_module("moeless.cli.pool")
    monkeypatch.setattr(pool_module, "find_pool", lambda _: SimpleNamespace(admin_socket=""))
    admin = Fleet()
    admin.list_models = lambda: [model]
    monkeypatch.setattr(pool_module, "AdminClient", lambda _: admin)
    head, row = CliRunner().invoke(pool_module.pool, ["list"]).output.splitlines()
    assert head.split()[0] == "model"
    assert row.startswith(f"{model['model']}  busy")


def test_draining_is_taken_back(run):
    admin = Admin("up")
    result = run(admin, "drain", "0", "--cancel")
    assert result.output == "device 0 is used again\n"
    assert admin.asked == [("keep", 0)]
