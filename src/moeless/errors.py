"""Every error that MoEless raises on purpose.

::

    MoelessError
    ├── ConfigError        a wrong option, device string, budget or combination of them
    ├── CheckpointError    a model directory, shard, key or quantisation that cannot be read
    ├── ModelError         a model that is not a Mixture of Experts, or of an unknown family
    ├── TraceError         a routing trace, arrival trace or prompt file that cannot be used
    ├── PlanError          loads or capacities from which no plan can be made
    ├── FunctionError      the function platform: a load, an invocation, a worker
    │   ├── TransitionError     a step that the function state machine does not know
    │   ├── BudgetError         a device budget that cannot hold what is asked of it
    │   └── UnavailableError    no device is left that could run a function
    ├── EngineError        the serving engine
    │   ├── RequestError        a request that cannot be honoured (the caller's fault)
    │   └── QueueFullError      too many requests wait; try again later
    └── MissingExtraError  an optional dependency is not installed

A message holds the value, the limit, and the next step. ``exit_code`` is what the command
line returns: 2 where the caller must change the input, 1 for everything else.
"""

import errno
import os
import re
import resource
from typing import ClassVar, Final


class MoelessError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(MoelessError):
    """A wrong option, device string or budget."""

    exit_code = 2


class CheckpointError(MoelessError):
    """A model directory, shard, key or quantisation that cannot be read."""

    exit_code = 2


class ModelError(MoelessError):
    """A model that MoEless cannot serve: dense, or of an unknown family."""

    exit_code = 2


class TraceError(MoelessError):
    """A routing trace, arrival trace or prompt file that cannot be used."""

    exit_code = 2


class PlanError(MoelessError):
    """Loads or capacities from which no plan can be made."""


class FunctionError(MoelessError):
    """The function platform failed to load, invoke or supervise."""


class TransitionError(FunctionError):
    """A step that the function state machine does not know."""


class BudgetError(FunctionError):
    """A device budget that cannot hold what is asked of it."""

    exit_code = 2


class UnavailableError(FunctionError):
    """No device is left that could run a function."""


class EngineError(MoelessError):
    """The serving engine failed."""


class RequestError(EngineError):
    """A request that cannot be honoured.

    Args:
        message: One line for the caller.
        param: The offending field, if it is one field.
        code: A short machine-readable reason, for example ``context_length_exceeded``.
    """

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(EngineError):
    """Too many requests wait.

    Args:
        message: One line for the caller.
        retry_after_s: When to try again, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MissingExtraError(MoelessError):
    """An optional dependency is not installed."""

    exit_code = 2


_LIMITS: Final = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "bytes in one file, shared memory included", "ulimit -f"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open files", "ulimit -n"),
    errno.ENOMEM: (resource.RLIMIT_AS, "bytes of address space", "ulimit -v"),
}
_EXHAUSTED: Final = {
    errno.EFBIG: "the file system takes no file of this size",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "the system has no more open files to give; raise fs.file-max",
    errno.ENOMEM: "the system has no memory left to give",
    errno.ENOSPC: "no space is left on the device; make room",
    errno.EDQUOT: "the disk quota is used up; make room",
}


def is_exhausted(error: OSError) -> bool:
    """Whether a resource ran out: no fault of the program, nor of what it was asked for."""
    return error.errno in _EXHAUSTED


def find_os_error(error: BaseException) -> OSError | None:
    """The system's error behind an exception; libraries in Rust have it in their words only."""
    if isinstance(error, OSError):
        return error
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def os_reason(error: OSError) -> str:
    """Why the system refused, in words.

    Args:
        error: What it raised.

    Returns:
        Where this process was limited, the limit, its value and the command that raises it.
    """
    code = error.errno or 0
    if code not in _EXHAUSTED:
        return error.strerror or str(error)
    if code in _LIMITS:
        kind, unit, command = _LIMITS[code]
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            return f"{os.strerror(code)}: the limit is {limit:,} {unit}; raise it with {command}"
    return f"{os.strerror(code)}: {_EXHAUSTED[code]}"
