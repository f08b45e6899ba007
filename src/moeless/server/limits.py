"""What one API key may use, and what it has used."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from moeless.errors import ConfigError
from moeless.server.errors import ApiError, rate_limited
from moeless.telemetry.ledger import KeyCounts

_MINUTE_S = 60.0

ClockS = Callable[[], float]
"""Seconds on a monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of one key on generation requests; None = no limit.

    Args:
        requests_per_minute: Requests, in bursts of at most as many.
        tokens_per_minute: Prompt and generated tokens. They are counted as they come, so a
            request that is let in may use more than is left; the next one waits for it.
        concurrent: Requests in progress.

    Raises:
        ConfigError: A limit that is not positive.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be 1 or more")


class Bucket:
    """So many units a minute, saved up for at most a minute.

    Args:
        per_minute: Units; None = any number.
        clock_s: The time.
    """

    def __init__(self, per_minute: int | None, clock_s: ClockS) -> None:
        self._rate = math.inf if per_minute is None else per_minute / _MINUTE_S
        self._capacity = math.inf if per_minute is None else float(per_minute)
        self._level = self._capacity
        self._clock_s = clock_s
        self._last_s = clock_s()

    def wait_s(self) -> float:
        """Seconds until one unit is there; 0 if it is there now."""
        if math.isinf(self._capacity):
            return 0.0
        now_s = self._clock_s()
        self._level = min(self._capacity, self._level + (now_s - self._last_s) * self._rate)
        self._last_s = now_s
        return max(0.0, 1.0 - self._level) / self._rate

    def take(self, units: int) -> None:
        """Use units, more than there are if need be."""
        self._level -= units


class Account:
    """One key's limits, and what it has used since the server began.

    Only the event loop changes it; other threads may read its counters.

    Args:
        name: Of the key.
        limits: What it may use.
        clock_s: The time.
    """

    def __init__(self, name: str, limits: KeyLimits, clock_s: ClockS = time.monotonic) -> None:
        self.name = name
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._limits = limits
        self._in_progress = 0
        self._request_bucket = Bucket(limits.requests_per_minute, clock_s)
        self._token_bucket = Bucket(limits.tokens_per_minute, clock_s)

    def enter(self) -> None:
        """Begin a generation request, which :meth:`leave` ends.

        Raises:
            ApiError: 429 with the time to wait; nothing was counted.
        """
        limits = self._limits
        if limits.concurrent is not None and self._in_progress >= limits.concurrent:
            raise self._refuse(f"{limits.concurrent} requests in progress", 1.0)
        wait_s = self._request_bucket.wait_s()
        if wait_s:
            raise self._refuse(f"{limits.requests_per_minute} requests a minute", wait_s)
        wait_s = self._token_bucket.wait_s()
        if wait_s:
            raise self._refuse(f"{limits.tokens_per_minute} tokens a minute", wait_s)
        self._request_bucket.take(1)
        self._in_progress += 1
        self.requests += 1

    def counts(self) -> KeyCounts:
        """What it has used."""
        return KeyCounts(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
        )

    def leave(self) -> None:
        """End a request that entered."""
        self._in_progress -= 1

    def use_prompt(self, tokens: int) -> None:
        """The engine has taken prompts of so many tokens."""
        self.prompt_tokens += tokens
        self._token_bucket.take(tokens)

    def use_generated(self, tokens: int) -> None:
        """So many tokens were generated."""
        self.generated_tokens += tokens
        self._token_bucket.take(tokens)

    def _refuse(self, limit: str, wait_s: float) -> ApiError:
        return rate_limited(
            f"the key {self.name!r} has used its {limit}: try again in {math.ceil(wait_s)} s",
            retry_after_s=wait_s,
        )
