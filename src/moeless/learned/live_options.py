"""How live traffic is learnt from."""

from dataclasses import dataclass

from moeless.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """How live traffic is learnt from.

    Args:
        held_out_tokens: The newest tokens, which are judged by and not yet fitted to. The older
            half of them decides how sure to be of logits, the newer one is judged by.
        first_fit_tokens: Tokens after which the first fit is made.
        fit_growth: The next is made when so many times as many tokens have been fitted to.
        longest_fit_interval: Tokens after which the next is made in any case.
        chunk_tokens: Tokens that are added at once.
        least_gain: Mean load accuracy over all layers that a new predictor has to win.
        max_sums_bytes: Memory for running sums. Where it is too small for all layers, those whose
            copied gate is the least accurate are fitted.
        max_held_out_bytes: Memory for held-out tokens; fewer are kept where it is too small.

    Raises:
        ConfigError: A number is out of range.
    """

    held_out_tokens: int = 1024
    first_fit_tokens: int = 512
    fit_growth: float = 1.5
    longest_fit_interval: int = 8192
    chunk_tokens: int = 256
    least_gain: float = 0.005
    max_sums_bytes: int = 3 * 2**29
    max_held_out_bytes: int = 2**29

    def __post_init__(self) -> None:
        counts = (
            self.held_out_tokens // 2,
            self.first_fit_tokens,
            self.longest_fit_interval,
            self.chunk_tokens,
            self.max_sums_bytes,
            self.max_held_out_bytes,
        )
        if min(counts) < 1 or self.fit_growth <= 1.0 or self.least_gain < 0.0:
            raise ConfigError(f"live learning: a number is out of range in {self}")


def next_fit(fitted_tokens: int, options: LiveOptions) -> int:
    """Tokens after which the next fit is made.

    Args:
        fitted_tokens: Those that this one was made of.
        options: How.
    """
    longest = fitted_tokens + options.longest_fit_interval
    return min(longest, int(options.fit_growth * fitted_tokens))
