import os
import signal
import subprocess
import sys
import textwrap

import pytest

from moeless.errors import ConfigError, MoelessError, QueueFullError
from moeless_experiments.processes import Job, Processes

BOTH = pytest.mark.parametrize("processes", ["here", "pool"], indirect=True)


@pytest.fixture(scope="module")
def pool():
    """Two processes that the tests share."""
    made = Processes(2)
    yield made
    made.close()


@pytest.fixture
def processes(request, pool):
    """One process, which is this one, or two others."""
    return pool if request.param == "pool" else Processes(1)


def negate(number):
    return -number


def fail(number):
    if number == 2:
        raise ConfigError("two is not allowed; use 3")
    return number


def fail_oddly(number):
    return [][number]


def fail_with_more(number):
    raise QueueFullError("too many", retry_after_s=float(number))


def leave(number):
    if number == 1:
        os._exit(3)
    return number


def jobs(*numbers):
    return [Job(f"case {number}", number) for number in numbers]


def run(processes, function, cases):
    found = {}
    processes.run(function, cases, found.__setitem__)
    return [found[place] for place in sorted(found)]


@BOTH
def test_cases_come_out_by_their_places(processes):
    assert run(processes, negate, jobs(3, 1, 2)) == [-3, -1, -2]


@BOTH
def test_an_error_is_one_line_of_its_own_kind_that_names_the_case(processes):
    with pytest.raises(ConfigError, match=r"^case 2: two is not allowed; use 3$"):
        run(processes, fail, jobs(2, 1))


@BOTH
def test_what_nobody_expected_is_one_line_as_well(processes):
    with pytest.raises(MoelessError, match=r"^case 5: IndexError: list index out of range$"):
        run(processes, fail_oddly, jobs(5, 5))


@BOTH
def test_an_error_that_is_made_of_more_than_its_message_is_told_all_the_same(processes):
    with pytest.raises(MoelessError, match=r"^case 1: too many$"):
        run(processes, fail_with_more, jobs(1, 1))


def test_a_process_that_ends_is_told_and_the_next_cases_have_others(pool):
    with pytest.raises(MoelessError, match=r"case \d: a process ended .*--processes"):
        run(pool, leave, jobs(1, 2))
    assert run(pool, negate, jobs(1, 2)) == [-1, -2]


INTERRUPTED = """
    import sys, time
    from moeless_experiments.processes import Job, Processes

    def work(number):
        print("at work", flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        try:
            Processes(2).run(work, [Job(str(n), n) for n in range(4)], print)
        except KeyboardInterrupt:
            sys.exit(42)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_began_them(tmp_path, sent):
    script = tmp_path / "interrupted.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as main:
        assert main.stdout.readline() == b"at work\n"
        assert main.stdout.readline() == b"at work\n"
        main.send_signal(sent)
        # The pipe is at its end once nobody holds it any more.
        assert main.stdout.read() == b""
        assert main.wait() == (42 if sent == signal.SIGINT else -sent)
