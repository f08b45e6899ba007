"""How a model's router turns a token's hidden state into experts, as data.

A predictor that copies a router needs to know which rule to apply to the logits; the rule is
described here and computed elsewhere. This module must not know how logits are obtained.
"""

from dataclasses import dataclass
from typing import Literal

RouterKind = Literal[
    "softmax_topk", "topk_softmax", "sparsemixer", "sigmoid_group", "topk_sigmoid"
]


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """The rule by which a router chooses and weighs experts.

    Kinds:
        ``softmax_topk``: softmax over all logits (float32), the K largest; divided by their sum
        if ``normalize`` (Mixtral, Qwen3-MoE, OLMoE).
        ``topk_softmax``: the K largest logits, softmax over those (GPT-OSS, GraniteMoeShared).
        ``sparsemixer``: two arg-max choices in a row, each weighed by a softmax over the logits
        within ``jitter_eps`` of the maximum; weights do not sum to one (PhiMoE).
        ``sigmoid_group``: sigmoid scores (float32), plus a correction bias for the choice only;
        of ``num_groups`` groups the ``top_groups`` with the largest sum of their two best scores
        stay; K largest of those; divided by their sum if ``normalize``; times ``scale``
        (DeepSeek-V3).
        ``topk_sigmoid``: the K largest logits, sigmoid of each (Llama 4).

    Args:
        kind: Which rule.
        path: The router module relative to its decoder layer, for example ``mlp.gate``. Its
            ``weight`` is [E, H].
        top_k: K, experts per token.
        has_bias: The router has a ``bias`` [E] that is added to the logits.
        normalize: Weights are divided by their sum.
        correction_bias: Name of the router's buffer [E] that is added to the scores for the
            choice only, or None.
        num_groups: Equal groups into which the experts are divided.
        top_groups: Groups from which experts may be chosen.
        scale: Factor on the weights.
        jitter_eps: Half the relative distance to the maximum within which ``sparsemixer`` keeps
            a logit.
        float32_logits: Logits are computed in float32 whatever the model's dtype.
    """

    kind: RouterKind
    path: str
    top_k: int
    has_bias: bool = False
    normalize: bool = False
    correction_bias: str | None = None
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    jitter_eps: float = 0.0
    float32_logits: bool = False
