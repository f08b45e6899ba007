import numba

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
