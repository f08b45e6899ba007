"""What an invocation reads and writes. Needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows of one invocation.

    Args:
        x_TH: Input rows.
        token_S: Which input row each assignment reads, int64.
        y_SH: Receives each assignment's output.
    """

    x_TH: torch.Tensor
    token_S: torch.Tensor
    y_SH: torch.Tensor

    def tokens_of(self, ranges_n2: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The input rows of the assignments in some ranges, one range after the other.

        Args:
            ranges_n2: From and to, ascending.
        """
        first, last = ranges_n2[0][0], ranges_n2[-1][1]
        if last - first == sum(stop - start for start, stop in ranges_n2):
            return self.token_S[first:last]
        return torch.cat([self.token_S[start:stop] for start, stop in ranges_n2])
