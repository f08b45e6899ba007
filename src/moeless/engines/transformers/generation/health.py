"""When a model counts as broken, and when to try it again. Pure; time comes in as an argument."""


class HealthMonitor:
    """Counts failures that no success interrupts.

    Args:
        failures_allowed: Failed requests in a row after which the model counts as broken.
        first_retry_s: Pause before the first new attempt; each further pause doubles.
        longest_retry_s: Longest pause.
    """

    def __init__(
        self,
        *,
        failures_allowed: int = 3,
        first_retry_s: float = 1.0,
        longest_retry_s: float = 30.0,
    ) -> None:
        self._failures_allowed = failures_allowed
        self._first_retry_s = first_retry_s
        self._longest_retry_s = longest_retry_s
        self._pause_s = first_retry_s
        self._failures = 0
        self._retry_at_s = 0.0
        self.reason: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether requests are worth accepting."""
        return self.reason is None

    def record_success(self) -> None:
        """A forward worked."""
        self._failures = 0
        self._pause_s = self._first_retry_s
        self.reason = None

    def record_failure(self, reason: str, now_s: float) -> None:
        """A request failed because its forward did."""
        self._failures += 1
        if self.healthy and self._failures >= self._failures_allowed:
            self._retry_at_s = now_s + self._pause_s
            self.reason = f"the model failed {self._failures} times in a row, last: {reason}"

    def record_failed_retry(self, reason: str, now_s: float) -> None:
        """A new attempt at the broken model failed as well."""
        self._failures += 1
        self._pause_s = min(2 * self._pause_s, self._longest_retry_s)
        self._retry_at_s = now_s + self._pause_s
        self.reason = f"the model failed {self._failures} times in a row, last: {reason}"

    def seconds_to_retry(self, now_s: float) -> float:
        """How long to wait before the model is tried again; 0 when it is time."""
        return max(0.0, self._retry_at_s - now_s)
