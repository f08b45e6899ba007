"""Holds back the newest live tokens, which are judged by before they are fitted to."""

from collections.abc import Iterator

import torch
from torch import Tensor


class NewestTokens:
    """A window over live tokens; what leaves it is to be fitted to.

    Args:
        held_out: Tokens that stay in it.
        chunk: Tokens that leave it at once.
    """

    def __init__(self, held_out: int, chunk: int) -> None:
        self._held_out, self._chunk = held_out, chunk
        self._parts: list[Tensor] = []
        self.skipped_tokens = 0
        """Tokens left out because they were not finite."""

    def push(self, tokens_TLH: Tensor) -> Iterator[Tensor]:
        """Take newer tokens [T, L, H], which are kept, and give the oldest ones that leave."""
        finite_T = tokens_TLH.isfinite().all(dim=-1).all(dim=-1)
        if not bool(finite_T.all()):
            self.skipped_tokens += int((~finite_T).sum())
            tokens_TLH = tokens_TLH[finite_T]
        self._parts.append(tokens_TLH)
        while sum(map(len, self._parts)) >= self._held_out + self._chunk:
            tokens = torch.cat(self._parts)
            self._parts = [tokens[self._chunk :].clone()]
            yield tokens[: self._chunk]

    @property
    def all_TLH(self) -> Tensor:
        """All that is in it, oldest first."""
        return torch.cat(self._parts)

    def halves(self) -> tuple[Tensor, Tensor]:
        """The held-out tokens: the older half decides, the newer one is judged by."""
        tokens = self.all_TLH[-self._held_out :]
        middle = len(tokens) // 2
        return tokens[:middle], tokens[middle:]
