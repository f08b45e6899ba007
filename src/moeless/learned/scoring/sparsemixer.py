"""PhiMoE: one arg-max after another, each without the experts chosen before."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule


def choose_sparsemixer(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Expert ids [T, K], in the order of choice.

    Outside training the jitter mask only decides how much a choice weighs, never which it is:
    the maximum itself is always within the mask.
    """
    del correction_E
    remaining = logits_TE
    chosen = []
    for _ in range(rule.top_k):
        index = remaining.max(dim=-1, keepdim=True).indices
        chosen.append(index)
        remaining = remaining.scatter(-1, index, float("-inf"))
    return torch.cat(chosen, dim=-1)
