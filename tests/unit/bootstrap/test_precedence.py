"""The supervisor goes before those that compute, as far as the system lets it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from effort import PATIENCE_S
from moeless.bootstrap.serving import precedence as module
from moeless.bootstrap.serving.precedence import precedence
from moeless.core.processor import describe_processor

RESET, RR, OTHER = os.SCHED_RESET_ON_FORK, os.SCHED_RR, os.SCHED_OTHER


class System:
    """Notes what is asked of the system; refuses the calls named."""

    def __init__(self, monkeypatch, *, refuses=(), hard_us=-1, without=""):
        processor = describe_processor(
            machine="x86_64", flags=frozenset(), environment={"MOELESS_WITHOUT": without}
        )
        monkeypatch.setattr(module, "this_processor", lambda: processor)
        self.policies, self.nice, self.timers, self.limits = [], [], [], []
        self.handlers = {}

        def ask(name, note):
            def call(*values):
                if name in refuses:
                    raise PermissionError(1, "Operation not permitted")
                return note(*values)

            return call

        def set_policy(_, policy, param):
            self.policies.append((policy, param.sched_priority))

        limit = module.resource
        monkeypatch.setattr(os, "sched_setscheduler", ask("real time", set_policy))
        monkeypatch.setattr(
            os, "setpriority", ask("nice", lambda *values: self.nice.append(values[-1]))
        )
        monkeypatch.setattr(signal, "signal", self.set_handler)
        monkeypatch.setattr(signal, "setitimer", lambda _, after_s: self.timers.append(after_s))
        monkeypatch.setattr(limit, "getrlimit", lambda _: (-1, hard_us))
        monkeypatch.setattr(limit, "setrlimit", lambda _, limits: self.limits.append(limits))

    def set_handler(self, number, handler):
        before = self.handlers.get(number, signal.SIG_DFL)
        self.handlers[number] = handler
        return before


def test_real_time_priority_is_the_lowest_and_not_for_those_that_it_starts(monkeypatch):
    system = System(monkeypatch)
    with precedence():
        assert system.policies == [(RR | RESET, 1)]
        assert system.limits == [(20_000, -1)]


def test_where_real_time_is_refused_a_nice_value_remains(monkeypatch):
    system = System(monkeypatch, refuses=("real time",))
    with precedence():
        assert system.nice == [-5]
        assert system.policies == system.limits == []


def test_real_time_priority_that_is_switched_off_is_not_asked_for(monkeypatch):
    system = System(monkeypatch, without="real-time")
    with precedence():
        assert system.nice == [-5]
        assert system.policies == system.limits == []
    assert system.handlers == {}


def test_where_nothing_is_allowed_nothing_happens(monkeypatch):
    system = System(monkeypatch, refuses=("real time", "nice"))
    with precedence():
        assert system.nice == system.policies == []


def test_nothing_is_asked_for_where_the_system_would_kill_who_thinks_for_long(monkeypatch):
    system = System(monkeypatch, hard_us=200_000)
    with precedence():
        assert system.policies == system.limits == []
    assert system.handlers == {}


def test_who_thinks_for_long_stands_back_for_a_while(monkeypatch):
    system = System(monkeypatch)
    with precedence():
        system.handlers[signal.SIGXCPU](signal.SIGXCPU, None)
        assert system.policies[1:] == [(OTHER | RESET, 0)]
        assert len(system.timers) == 1
        system.handlers[signal.SIGALRM](signal.SIGALRM, None)
        assert system.policies[2:] == [(RR | RESET, 1)]
        assert len(system.limits) == 2, "the system has raised the limit"


def test_afterwards_everything_is_as_before_whichever_signal_comes_late(monkeypatch):
    system = System(monkeypatch)
    late = {}

    def serve():
        with precedence():
            late.update(system.handlers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve()
    assert system.policies[-1] == (OTHER | RESET, 0)
    assert system.limits[-1] == (-1, -1)
    assert system.timers == [0]
    assert set(system.handlers.values()) == {signal.SIG_DFL}
    for number, handler in late.items():
        handler(number, None)
    assert system.policies[-1] == (OTHER | RESET, 0)
    assert system.timers == [0]


CHILD = """
import os, subprocess, sys, threading, time
from moeless.bootstrap.serving import precedence as module

module._STAND_BACK_S = 0.05
turn = module.precedence()
turn.__enter__()
kind = lambda: os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
kinds = [kind()]
thread = threading.Thread(target=lambda: kinds.append(kind()))
thread.start()
thread.join()
asks = [sys.executable, "-S", "-c", "import os; print(os.sched_getscheduler(0), os.nice(0))"]
print(*kinds, subprocess.check_output(asks, text=True).strip(), flush=True)
while kind() != os.SCHED_OTHER:
    pass  # thinks for long
print(kind(), os.nice(0), flush=True)
while kind() != os.SCHED_RR:
    time.sleep(0.01)
print(kind(), flush=True)
turn.__exit__(None, None, None)
print(kind(), flush=True)


class SlowToEnd:
    def __del__(self, clock=time.process_time):  # other names are gone by then
        began_s = clock()
        while clock() < began_s + 0.1:
            pass


sys.slow = SlowToEnd()  # outlives the handlers of signals
"""


def test_the_system_does_what_it_is_asked_to():
    if not may_be_real_time():
        pytest.skip("real-time priority is not allowed here")
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={name: value for name, value in os.environ.items() if name != "MOELESS_WITHOUT"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    before, late, again, afterwards = done.stdout.splitlines()
    assert before == f"{RR} {OTHER} {OTHER} 0"
    assert late == f"{OTHER} -5"
    assert again == f"{RR}"
    assert afterwards == f"{OTHER}"


def may_be_real_time():
    """Whether the system lets a thread of ours, which ends at once, have real-time priority."""
    allowed = []

    def ask():
        try:
            os.sched_setscheduler(0, RR | RESET, os.sched_param(1))
        except OSError:
            return
        allowed.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return bool(allowed)
