"""``moeless devices`` while somebody else changes his mind."""

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


def test_draining_is_taken_back(run):
    admin = Admin("up")
    result = run(admin, "drain", "0", "--cancel")
    assert result.output == "device 0 is used again\n"
    assert admin.asked == [("keep", 0)]
