"""Devices join and leave and budgets change while tokens are computed: tokens stay the same."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from effort import PATIENCE_S
from moeless.errors import ConfigError
from moeless.functions.supervisor.admin_client import AdminClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(serve, reference):
    return serve(reference[0], policy="moeless", max_devices=4)


@pytest.fixture(scope="module")
def admin(served):
    with AdminClient(served.runtime.supervisor.directory.admin_socket) as client:
        yield client


@pytest.fixture
def await_state(admin, wait_until):
    """Wait until a device is in a state."""

    def wait(device, *states):
        return wait_until(
            lambda: next((d for d in [admin.list_devices()[device]] if d["state"] in states), None)
        )

    return wait


@pytest.fixture
def generating(served, tokens_of, expected):
    """Generates all the time; every answer is the expected one."""
    running, count = True, 0

    def go_on():
        nonlocal count
        while running:
            assert tokens_of(served.model) == expected
            count += 1

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(go_on)
        yield lambda: count
        running = False
        future.result()
    assert count > 0


def states(admin):
    return [device["state"] for device in admin.list_devices()]


def count_descriptors(pid):
    return psutil.Process(pid).num_fds()


def test_devices_join_and_leave_again_and_again_and_nothing_is_left(
    served, admin, await_state, generating, wait_until
):
    supervisor = served.runtime.supervisor.process.pid
    before = None
    for cycle in range(3):
        device = admin.add("cpu")
        assert device == 2
        await_state(device, "up")
        seen = generating()
        wait_until(lambda seen=seen: generating() > seen)
        held = admin.list_devices()[device]["held_bytes"]
        assert held > 0, "the planner uses a device that has joined"
        board = served.client.board
        wait_until(lambda board=board: board.used_ns_LED[:, :, 2].any())
        leaving = [0, 1, 2][cycle]
        admin.drain(leaving)
        found = await_state(leaving, "drained")
        assert (found["held_bytes"], found["pid"], found["budget_bytes"]) == (0, None, 0)
        assert not board.warm_LED[:, :, leaving].any()
        assert not board.planned_LED[:, :, leaving].any()
        if leaving != 2:
            assert admin.add("cpu") == leaving, "the slot is free again"
            await_state(leaving, "up")
            admin.drain(2)
            await_state(2, "drained")
        children = len(psutil.Process(supervisor).children())
        counts = count_descriptors(supervisor), count_descriptors(os.getpid()), children
        before = before or counts
        assert counts <= before
    report = served.client.report()
    assert report["failed_loads_D"] == [0] * 4
    assert report["worker_restarts"] == [0] * 4


def test_snapshots_show_the_devices_that_are_there(served, admin):
    snapshot = served.runtime.snapshot()
    there = [d for d in admin.list_devices() if d["state"] != "down"]
    assert snapshot.devices == tuple(d["label"] for d in there)
    assert snapshot.device_states_D == tuple(d["state"] for d in there)
    assert snapshot.replicas_LED.shape[2] == len(there)
    assert len(snapshot.budget_bytes_D) == len(snapshot.worker_restarts_D) == len(there)


def test_a_smaller_budget_is_kept_to_and_a_larger_one_is_used(
    served, admin, generating, wait_until
):
    first = admin.list_devices()[0]
    size = served.client.function_bytes
    admin.set_budget(0, 3 * size + 1)
    wait_until(lambda: admin.list_devices()[0]["held_bytes"] <= 3 * size)
    seen = generating()
    wait_until(lambda: generating() > seen + 1)
    assert admin.list_devices()[0]["held_bytes"] <= 3 * size
    admin.set_budget(0, first["budget_bytes"])
    assert admin.list_devices()[0]["budget_bytes"] == first["budget_bytes"]
    wait_until(lambda: admin.list_devices()[0]["held_bytes"] > 3 * size)


def test_what_devices_could_not_hold_is_refused_with_figures(served, admin):
    size = served.client.function_bytes
    experts = served.loaded.spec.num_experts
    budgets = [device["budget_bytes"] for device in admin.list_devices()]
    with pytest.raises(ConfigError, match="does not hold one expert"):
        admin.set_budget(0, size - 1)
    with pytest.raises(ConfigError, match="bytes of memory that this machine"):
        admin.set_budget(0, 10**17)
    with pytest.raises(ConfigError, match="bytes of memory that this machine"):
        admin.add("cpu", budget_bytes=10**17)
    admin.set_budget(1, size)
    with pytest.raises(ConfigError, match=f"without device 0 .* hold 1 experts .* has {experts}"):
        admin.drain(0)
    with pytest.raises(ConfigError, match=f"hold {experts - 1} experts .* has {experts}"):
        admin.set_budget(0, (experts - 2) * size)
    admin.set_budget(1, budgets[1])
    with pytest.raises(ConfigError, match="device 3 is down"):
        admin.drain(3)
    with pytest.raises(ConfigError, match="there is no device 4"):
        admin.set_budget(4, size)
    assert [device["budget_bytes"] for device in admin.list_devices()] == budgets


def test_a_device_that_dies_before_it_joins_is_reported_and_its_slot_is_free_again(
    admin, generating, await_state
):
    device = admin.add("cpu")
    os.kill(admin.list_devices()[device]["pid"], signal.SIGKILL)
    found = await_state(device, "down")
    assert "did not join" in found["note"]
    assert admin.add("cpu") == device
    admin.drain(device)  # before it has begun
    await_state(device, "drained")
    assert generating is not None


def test_a_device_that_dies_while_it_is_drained_is_drained(
    served, admin, tokens_of, expected, await_state
):
    """And the tokens that wait for it meanwhile are computed elsewhere."""
    device = admin.add("cpu")
    await_state(device, "up")
    assert tokens_of(served.model) == expected
    pid = admin.list_devices()[0]["pid"]
    answers = []
    thread = threading.Thread(target=lambda: answers.append(tokens_of(served.model)))
    os.kill(pid, signal.SIGSTOP)
    thread.start()
    admin.drain(0)
    with pytest.raises(ConfigError, match="device 0 is draining"):
        admin.set_budget(0, 10**9)
    with pytest.raises(ConfigError, match="device 0 is draining"):
        admin.drain(0)
    os.kill(pid, signal.SIGKILL)
    await_state(0, "drained")
    thread.join()
    assert answers == [expected]
    assert admin.add("cpu") == 0
    await_state(0, "up")
    admin.drain(device)
    await_state(device, "drained")


def test_draining_can_be_taken_back_while_it_goes_on(
    served, admin, tokens_of, expected, await_state, wait_until
):
    assert tokens_of(served.model) == expected
    with pytest.raises(ConfigError, match="device 0 is up: there is no draining to take back"):
        admin.keep(0)
    pid = admin.list_devices()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)  # so that it cannot end
    admin.drain(0)
    assert states(admin)[0] == "draining"
    assert not served.client.board.planned_LED[:, :, 0].any()
    admin.keep(0)
    assert states(admin)[0] == "up"
    os.kill(pid, signal.SIGCONT)
    assert tokens_of(served.model) == expected
    found = await_state(0, "up")
    assert found["budget_bytes"] > 0
    wait_until(lambda: served.client.board.planned_LED[:, :, 0].any())
    assert tokens_of(served.model) == expected


def test_the_command_line_adds_drains_and_says_what_is_wrong(served, admin):
    pool = str(served.runtime.supervisor.directory.path)

    def run(*arguments):
        command = [sys.executable, "-m", "moeless", "devices", *arguments, "--pool", pool]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode, done.stdout + done.stderr

    assert run("drain", "7") == (2, "moeless: error: there is no device 7; devices are 0 to 3\n")
    code, text = run("drain", "0", "--cancel")
    assert (code, "there is no draining to take back" in text) == (2, True)
    code, text = run("list")
    assert code == 0
    assert "2 more can join" in text
    code, text = run("budget", "0", "1")
    assert code == 2
    assert "does not hold one expert" in text
    assert Path(pool).is_dir()
    assert states(admin)[:2] == ["up", "up"]


def test_where_devices_are_fixed_none_joins(serve, reference, tokens_of):
    served = serve(reference[0])
    with AdminClient(served.runtime.supervisor.directory.admin_socket) as client:
        with pytest.raises(ConfigError, match=r"all 2 slots .* --max-devices"):
            client.add("cpu")
        client.drain(1)
    assert tokens_of(served.model) == reference[1]
    served.close()
