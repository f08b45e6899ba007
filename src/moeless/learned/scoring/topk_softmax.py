"""GPT-OSS, GraniteMoeShared: the K largest logits; the softmax comes after the choice."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule


def choose_topk_softmax(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Expert ids [T, K], largest logit first."""
    del correction_E
    return torch.topk(logits_TE, rule.top_k, dim=-1).indices
