"""DeepSeek-V3: sigmoid scores with a correction bias, chosen within the best groups."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule


def choose_sigmoid_group(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Expert ids [T, K], in no particular order.

    Experts are divided into equal groups; the groups with the largest sum of their two best
    scores stay, and the K best experts of those are chosen.
    """
    scores_TE = logits_TE.float().sigmoid()
    if correction_E is not None:
        scores_TE = scores_TE + correction_E
    if rule.top_groups < rule.num_groups:
        tokens, experts = scores_TE.shape
        size = experts // rule.num_groups
        grouped = scores_TE.view(tokens, rule.num_groups, size)
        strength = grouped.topk(min(2, size), dim=-1).values.sum(dim=-1)
        best = strength.topk(rule.top_groups, dim=-1, sorted=False).indices
        excluded = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, value=False)
        scores_TE = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).view_as(scores_TE)
    return torch.topk(scores_TE, rule.top_k, dim=-1, sorted=False).indices
