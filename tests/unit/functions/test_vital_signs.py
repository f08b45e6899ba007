"""Which workers count as hung: one that is slow never does, one that stands still soon does."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.functions.supervisor.vital_signs import (
    OpenWork,
    VitalSigns,
    allowed_silence_s,
    find_hang,
    is_runnable,
)

SECONDS = st.floats(min_value=0.0, max_value=1e5)
SILENCE = st.floats(min_value=1.0, max_value=1e3)
WORK = st.lists(st.builds(OpenWork, allowed_s=SECONDS, waited_s=SECONDS), max_size=4)
SIGNS = st.builds(
    VitalSigns,
    silent_s=SECONDS,
    is_runnable=st.booleans(),
    tokens_wait=st.booleans(),
    open_work=WORK,
    serving_s=SECONDS,
)


SHARE = st.floats(min_value=0.0, max_value=1.0)
BEYOND = st.floats(min_value=1.001, max_value=1e3)


@given(SIGNS, SILENCE, SHARE)
def test_nobody_is_given_up_within_what_is_allowed(signs, silence_s, share):
    patient = [
        replace(work, allowed_s=max(work.allowed_s, min(work.waited_s, signs.serving_s)))
        for work in signs.open_work
    ]
    limit_s = allowed_silence_s(
        silence_s, tokens_wait=signs.tokens_wait, is_runnable=signs.is_runnable
    )
    signs = replace(signs, silent_s=share * limit_s, open_work=patient)
    assert find_hang(signs, silence_s) is None


@given(SIGNS, SILENCE, BEYOND)
def test_whoever_is_silent_beyond_the_longest_limit_is_given_up(signs, silence_s, factor):
    signs = replace(signs, silent_s=6 * silence_s * factor)
    assert "no sign of life" in find_hang(signs, silence_s)


@given(SIGNS, SILENCE, SECONDS, BEYOND)
def test_whoever_was_served_for_longer_than_allowed_is_given_up(
    signs, silence_s, allowed_s, factor
):
    late_s = (allowed_s + 1) * factor
    work = OpenWork(allowed_s=allowed_s, waited_s=late_s)
    signs = replace(signs, open_work=[*signs.open_work, work], serving_s=late_s)
    assert find_hang(signs, silence_s) is not None


@given(SIGNS, SILENCE)
def test_one_that_waits_for_a_core_is_never_given_up_before_one_that_does_not(signs, silence_s):
    limits = [
        allowed_silence_s(silence_s, tokens_wait=signs.tokens_wait, is_runnable=runnable)
        for runnable in (False, True)
    ]
    assert 1.0 <= limits[0] < limits[1]


def test_the_limits_say_what_the_documents_say():
    def limit_s(**facts):
        facts = {"tokens_wait": False, "is_runnable": False} | facts
        return allowed_silence_s(10.0, **facts)

    assert limit_s() == 10
    assert limit_s(tokens_wait=True) == 1
    assert limit_s(is_runnable=True) == limit_s(is_runnable=True, tokens_wait=True) == 60


def test_the_reason_says_for_how_long_and_that_tokens_wait():
    quick = VitalSigns(silent_s=1.1, tokens_wait=True)
    assert find_hang(quick, 10.0) == "no sign of life for 1 s, and tokens wait for it"
    assert find_hang(VitalSigns(silent_s=10.1), 10.0) == "no sign of life for 10 s"
    stuck = VitalSigns(
        silent_s=0.1,
        tokens_wait=True,
        open_work=[OpenWork(allowed_s=12.5, waited_s=13.0)],
        serving_s=14.0,
    )
    assert find_hang(stuck, 10.0) == "no answer within 12.5 s"


def test_what_an_engine_waited_while_another_one_was_served_does_not_count():
    work = OpenWork(allowed_s=10.0, waited_s=500.0)
    just_begun = VitalSigns(silent_s=0.0, tokens_wait=True, open_work=[work], serving_s=0.2)
    assert find_hang(just_begun, 10.0) is None


@pytest.fixture
def process():
    """A process that computes once its line has come."""
    code = "print(flush=True)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()


def holds(condition):
    """Whether it becomes true: how soon, is up to the system."""
    deadline_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def test_a_process_that_computes_is_runnable_and_a_stopped_one_is_not(process):
    assert is_runnable(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert holds(lambda: not is_runnable(process.pid))
    process.send_signal(signal.SIGCONT)
    assert holds(lambda: is_runnable(process.pid))


def test_a_process_that_sleeps_or_has_ended_is_not_runnable(process):
    sleeper = subprocess.Popen(["/bin/sleep", "600"])
    try:
        assert holds(lambda: not is_runnable(sleeper.pid))
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not is_runnable(sleeper.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_runnable(process.pid)  # nobody has reaped it
