"""Why the system refused is told in words; a limit of the process with its value and command."""

import errno
import os
import resource

import pytest

from moeless.errors import find_os_error, is_exhausted, os_reason


@pytest.mark.parametrize(
    ("code", "kind", "command"),
    [
        (errno.EFBIG, resource.RLIMIT_FSIZE, "ulimit -f"),
        (errno.EMFILE, resource.RLIMIT_NOFILE, "ulimit -n"),
        (errno.ENOMEM, resource.RLIMIT_AS, "ulimit -v"),
    ],
)
def test_a_limit_is_told_with_its_value_and_command(monkeypatch, code, kind, command):
    limits = {kind: 12345}
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY),) * 2
    )
    error = OSError(code, os.strerror(code))
    assert is_exhausted(error)
    assert "the limit is 12,345" in os_reason(error)
    assert command in os_reason(error)
    limits.clear()
    assert "limit is" not in os_reason(error), "no limit of the process, so something else"
    assert os_reason(error).startswith(os.strerror(code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENFILE])
def test_what_no_limit_of_the_process_bounds_says_what_to_do(code):
    assert is_exhausted(OSError(code, ""))
    assert "; " in os_reason(OSError(code, ""))


def test_other_refusals_keep_the_systems_words():
    assert os_reason(PermissionError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert os_reason(OSError("10 requested and 3 written")) == "10 requested and 3 written"
    assert not is_exhausted(PermissionError(errno.EACCES, ""))


def test_the_systems_error_is_found_in_the_words_of_a_library():
    told = ValueError("Error while serializing: I/O error: File too large (os error 27)")
    found = find_os_error(told)
    assert found is not None
    assert found.errno == errno.EFBIG
    assert find_os_error(ValueError("no")) is None
    error = OSError(errno.EIO, "")
    assert find_os_error(error) is error
