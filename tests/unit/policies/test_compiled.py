import signal
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest

from moeless.policies.kernels import compiled as module


def test_loops_work_where_no_folder_can_hold_their_machine_code(monkeypatch):
    def njit(signature, *, cache=False, nogil=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(signature, nogil=nogil)

    monkeypatch.setattr(module, "njit", njit)

    @module.compiled("int64(int64)")
    def double(x):
        return 2 * x

    assert double(21) == 42
    assert double.signatures


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_loop_is_compiled_arrives_when_it_is_done(monkeypatch, number):
    done = []

    def njit(signature, **options):
        signal.raise_signal(number)
        done.append("compiled")
        return lambda function: function

    def interrupt(_number, _frame):
        raise KeyboardInterrupt(*done)

    monkeypatch.setattr(module, "njit", njit)
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="compiled"):
            module.compiled("int64(int64)")(abs)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_loops_are_compiled_in_other_threads_too():
    with ThreadPoolExecutor(1) as pool:
        triple = pool.submit(module.compiled("int64(int64)"), lambda x: 3 * x).result()
    assert triple(14) == 42
