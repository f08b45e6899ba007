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

from typing import ClassVar


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
