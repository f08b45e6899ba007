"""Whether a worker hangs: what it shows of itself, and how that is judged.

Two questions, kept apart. *Does it live?* Its pulse says so, and where the pulse is silent the
system: on a machine that has more to do than cores a worker may have to wait for one for seconds,
which is not the same as being stopped. *Does it get on?* Engines say how long what they sent may
take, and the worker whom it serves since when.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DOUBT_SHARE = 0.1
_LEAST_DOUBT_S = 1.0
"""A worker that tokens wait for is given up after this part of the time without a sign of life."""
_STARVED_FACTOR = 6.0
"""One that would run if it were let is given so many times as long as one that would not."""


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """What an engine waits for.

    Args:
        allowed_s: How long it may take.
        waited_s: How long the engine has waited.
    """

    allowed_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class VitalSigns:
    """What is known of one worker.

    Args:
        silent_s: Time since its last beat.
        is_runnable: One of its threads runs, or waits for nothing but a core.
        tokens_wait: Tokens of some engine wait for it.
        open_work: What it was sent by the engine that it serves, or by all while it serves none;
            what others have sent has to wait until then.
        serving_s: For how long it has served that engine, or none.
    """

    silent_s: float
    is_runnable: bool = False
    tokens_wait: bool = False
    open_work: Sequence[OpenWork] = ()
    serving_s: float = 0.0


def allowed_silence_s(silence_s: float, *, tokens_wait: bool, is_runnable: bool) -> float:
    """How long a worker may show no sign of life.

    Args:
        silence_s: For one that nobody waits for and that is not runnable.
        tokens_wait: Whether tokens wait for it.
        is_runnable: As in ``VitalSigns``.
    """
    if is_runnable:
        return _STARVED_FACTOR * silence_s
    return max(_LEAST_DOUBT_S, _DOUBT_SHARE * silence_s) if tokens_wait else silence_s


def find_hang(signs: VitalSigns, silence_s: float) -> str | None:
    """Why a worker counts as hung, if it does.

    Args:
        signs: What is known of it.
        silence_s: As for ``allowed_silence_s``.
    """
    limit_s = allowed_silence_s(
        silence_s, tokens_wait=signs.tokens_wait, is_runnable=signs.is_runnable
    )
    if signs.silent_s > limit_s:
        wait = ", and tokens wait for it" if signs.tokens_wait else ""
        return f"no sign of life for {limit_s:g} s{wait}"
    for work in signs.open_work:
        if min(work.waited_s, signs.serving_s) > work.allowed_s:
            return f"no answer within {work.allowed_s:.3g} s"
    return None


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process runs or waits for nothing but a core.

    Not so one that is stopped, frozen, waits for a disk, for a lock, or has ended. False where the
    system does not say.
    """
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                # The name in brackets may hold anything, brackets too; the state follows it.
                if (thread / "stat").read_bytes().rpartition(b") ")[2][:1] == b"R":
                    return True
    return False
