"""Limits of the text engine."""

from dataclasses import dataclass

from moeless.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the operator may set.

    Args:
        max_batch_size: Sequences that run at the same time.
        max_waiting: Requests that may wait beyond those.
        max_model_len: Tokens of prompt and completion; None takes the model's own limit.
        prefill_chunk_tokens: Prompt tokens that may delay one decode step.
        batch_invariant: A sequence's numbers are the same to the bit whatever runs beside it.
        first_retry_s: Pause before a broken model is tried again; later pauses double.

    Raises:
        ConfigError: A value is out of range.
    """

    max_batch_size: int = 32
    max_waiting: int = 256
    max_model_len: int | None = None
    prefill_chunk_tokens: int = 512
    batch_invariant: bool = False
    first_retry_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name, least in (
            ("max_batch_size", 1),
            ("max_waiting", 0),
            ("prefill_chunk_tokens", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if not self.first_retry_s > 0:
            raise ConfigError(f"first_retry_s is {self.first_retry_s}; it must be above 0")
