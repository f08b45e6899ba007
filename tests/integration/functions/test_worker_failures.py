"""Workers that die or hang while tokens are generated: the tokens stay the same."""

import json
import os
import signal
import threading
import time

import psutil
import pytest

pytestmark = pytest.mark.slow


def interrupt(invoker, *, at, action):
    """Have something happen right after, or right before, work was handed out."""
    begin, calls = invoker.begin, []

    def begin_and_act(*arguments, **keywords):
        calls.append(len(calls))
        if len(calls) == at:
            action("before")
        begin(*arguments, **keywords)
        if len(calls) == at:
            action("after")

    invoker.begin = begin_and_act


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_worker_killed_in_mid_generation_changes_no_token_and_is_replaced(
    moment, serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory)
    victim = served.worker_pids()[1]

    def kill(now):
        if now == moment:
            os.kill(victim, signal.SIGKILL)

    interrupt(served.runtime.invoker, at=14, action=kill)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D[1])
    report = served.client.report()
    assert report["worker_restarts"] == [0, 1]
    assert report["worker_pids"][1] != victim
    assert tokens_of(served.model) == expected
    snapshot = served.runtime.snapshot()
    assert snapshot.worker_restarts_D == (0, 1)
    served.close()


def test_both_workers_killed_one_after_the_other_change_no_token(
    serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, policy="paper")
    for device in (0, 1):
        os.kill(served.worker_pids()[device], signal.SIGKILL)
        assert tokens_of(served.model) == expected
        wait_until(lambda device=device: served.client.board.device_up_D[device])
    assert tokens_of(served.model) == expected
    assert served.client.report()["worker_restarts"] == [1, 1]
    served.close()


@pytest.fixture
def worker_does(tmp_path, monkeypatch):
    """Have one worker do something in an invocation, once: Python that a test writes."""

    def arrange(deed):
        todo = tmp_path / "todo"
        (tmp_path / "sitecustomize.py").write_text(
            f"""
import pathlib, sys
if "moeless.functions.worker" in sys.orig_argv:
    from moeless.functions.host.host import ExpertHost
    invoke = ExpertHost.invoke
    def invoke_and_act(self, *arguments, **keywords):
        try:
            pathlib.Path({str(todo)!r}).unlink()
        except FileNotFoundError:
            return invoke(self, *arguments, **keywords)
        {deed}
        return invoke(self, *arguments, **keywords)
    ExpertHost.invoke = invoke_and_act
"""
        )
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        return todo

    return arrange


def test_a_worker_that_computes_for_long_is_waited_for_though_its_pulse_is_silent(
    serve, reference, tokens_of, worker_does
):
    directory, expected = reference
    began_s = time.perf_counter()
    sum(range(10_000_000))
    count = int(10_000_000 * 4 / (time.perf_counter() - began_s))
    # One call that lets no other thread of the process run, for some seconds.
    todo = worker_does(f"sum(range({count}))")
    served = serve(directory)
    before = served.worker_pids()
    assert tokens_of(served.model) == expected
    todo.touch()
    assert tokens_of(served.model) == expected
    assert not todo.exists()
    assert served.client.report()["worker_restarts"] == [0, 0]
    assert served.worker_pids() == before
    served.close()


def test_a_worker_that_lives_but_never_answers_is_replaced_and_changes_no_token(
    serve, reference, tokens_of, worker_does, wait_until, tmp_path
):
    directory, expected = reference
    todo = worker_does("import threading; threading.Event().wait()")
    events = tmp_path / "events.jsonl"
    served = serve(directory, invocation_timeout_s=0.5, events=events)
    assert tokens_of(served.model) == expected
    todo.touch()
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D.all())
    assert sum(served.client.report()["worker_restarts"]) == 1
    served.close()
    assert lost_workers(events) == ["no answer within 0.5 s"]


def lost_workers(events):
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return [event["reason"] for event in found if event["event"] == "WorkerLost"]


def test_a_worker_that_hangs_is_replaced_after_its_deadline_and_changes_no_token(
    serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, invocation_timeout_s=0.3)
    tokens_of(served.model)
    victim = served.worker_pids()[0]

    def stop(now):
        if now == "before":
            os.kill(victim, signal.SIGSTOP)

    interrupt(served.runtime.invoker, at=20, action=stop)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D[0])
    assert served.client.report()["worker_restarts"] == [1, 0]
    assert tokens_of(served.model) == expected
    served.close()


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_with_all_workers_killed_at_once_tokens_wait_for_their_successors(
    devices, serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, devices=devices)

    def kill_all(now):
        if now == "before":
            for pid in served.worker_pids():
                os.kill(pid, signal.SIGKILL)

    interrupt(served.runtime.invoker, at=9, action=kill_all)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D.all())
    assert all(count == 1 for count in served.client.report()["worker_restarts"])
    served.close()


def test_a_worker_that_hangs_while_nobody_asks_it_is_replaced_too(
    serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, worker_silence_s=1.0)
    victim = served.worker_pids()[1]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: served.client.report()["worker_restarts"] == [0, 1])
    wait_until(lambda: served.client.board.device_up_D[1])
    assert served.worker_pids()[1] != victim
    assert tokens_of(served.model) == expected
    served.close()


def test_a_worker_that_pauses_is_waited_for_and_one_that_hangs_is_given_up_while_tokens_wait(
    serve, reference, tokens_of, wait_until, tmp_path
):
    directory, expected = reference
    events = tmp_path / "events.jsonl"
    served = serve(directory, worker_silence_s=10.0, events=events)
    pausing, hanging = served.worker_pids()

    def pause(now):
        if now == "before":
            os.kill(pausing, signal.SIGSTOP)
            threading.Timer(0.4, os.kill, (pausing, signal.SIGCONT)).start()

    def hang(now):
        if now == "before":
            os.kill(hanging, signal.SIGSTOP)

    interrupt(served.runtime.invoker, at=7, action=pause)
    interrupt(served.runtime.invoker, at=15, action=hang)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D[1])
    assert tokens_of(served.model) == expected
    assert served.client.report()["worker_restarts"] == [0, 1]
    assert served.worker_pids()[0] == pausing
    served.close()
    assert lost_workers(events) == ["no sign of life for 1 s, and tokens wait for it"]


def test_a_lost_worker_is_replaced_by_one_that_stands_by_or_else_by_a_new_one(
    serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, spare_workers=1)
    wait_until(lambda: served.client.report()["spare_pids"])
    (spare,) = served.client.report()["spare_pids"]
    assert psutil.Process(spare).name() == "moeless-spare"
    victim = served.worker_pids()[0]

    def kill(now):
        if now == "before":
            os.kill(victim, signal.SIGKILL)

    interrupt(served.runtime.invoker, at=14, action=kill)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D[0])
    assert served.worker_pids()[0] == spare
    cores = set(psutil.Process(spare).cpu_affinity())
    threads = psutil.Process(spare).threads()
    assert all(os.sched_getaffinity(thread.id) == cores for thread in threads)

    wait_until(lambda: served.client.report()["spare_pids"])
    (another,) = served.client.report()["spare_pids"]
    assert another != spare
    os.kill(another, signal.SIGKILL)  # nobody misses it
    os.kill(served.worker_pids()[1], signal.SIGKILL)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.board.device_up_D[1])
    assert served.worker_pids()[1] != another
    served.close()
