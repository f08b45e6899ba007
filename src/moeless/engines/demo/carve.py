"""Carve one dense feed-forward block into a shared expert, routed experts and a gate.

Tensors in, tensors out; no training, every step in closed form or a fixed number of rounds:

1. the neurons that matter most on average become the shared expert;
2. the others are clustered by co-activation into experts of equal size, then moved between experts
   while the gate is fitted again, so that a neuron sits where the gate selects it when it matters;
3. the gate is a ridge regression from the block's input to the logarithm of each expert's energy;
4. all down projections are fitted once more to the dense answer, by ridge regression on the
   activations that survive the routing: what the unchosen experts would have added can partly
   be predicted from the others.

Knows nothing about models, files or text. Shape suffixes: T tokens, H hidden, I neurons of the
dense block, N neurons that are routed, E experts, K experts per token, W neurons per expert.

Source: the split by importance and co-activation follows MoEfication and CMoE; moving neurons
against the fitted gate, and fitting the down projections under the routing, are ours.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from moeless.errors import ModelError

ROUTER_SCALE = 1e-3
"""Makes the softmax over the chosen logits uniform to a part in a thousand: weight 1 / K each."""

_CLUSTER_TOKENS = 4096
_CLUSTER_DIMENSIONS = 96
_CLUSTER_ROUNDS = 6
_REFINE_ROUNDS = 16
_GATE_RIDGE = 1e-3
_DOWN_RIDGE = 1.0
_LENGTH_POWER = -0.5


@dataclass(frozen=True, kw_only=True)
class CarveShape:
    """How many neurons go where.

    Args:
        experts: Routed experts (E).
        expert_width: Neurons of each routed expert (W).
        top_k: Routed experts per token (K).
        seed: Seed of the first clustering.
    """

    experts: int
    expert_width: int
    top_k: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Weights of a gated block ``down(silu(gate(x)) * up(x))``.

    Args:
        gate_IH: Gate projection.
        up_IH: Up projection.
        down_HI: Down projection.
    """

    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor

    def activate(self, x_TH: Tensor) -> Tensor:
        """Activations [T, I] of all neurons."""
        return functional.silu(x_TH @ self.gate_IH.T).mul_(x_TH @ self.up_IH.T)


@dataclass(frozen=True, kw_only=True)
class CarvedBlock:
    """Result of a carving; neuron ids count in the dense block.

    Args:
        shared: Ids of the shared expert's neurons, int64 [I - E * W].
        groups_EW: Ids of each routed expert's neurons, int64.
        router_EH: Gate weights, exactly representable in bfloat16.
        down_HI: Fitted down projection, columns in the dense block's order.
    """

    shared: Tensor
    groups_EW: Tensor
    router_EH: Tensor
    down_HI: Tensor

    def route(self, x_TH: Tensor, top_k: int) -> Tensor:
        """Which experts each token uses: ones and zeros, float [T, E]."""
        return _choose(x_TH @ self.router_EH.T, top_k)

    def mask_activations(self, act_TI: Tensor, chosen_TE: Tensor) -> Tensor:
        """Activations with those of unchosen experts set to zero, [T, I]."""
        masked_TI = act_TI.clone()
        width = self.groups_EW.shape[1]
        masked_TI[:, self.groups_EW.flatten()] *= chosen_TE.repeat_interleave(width, dim=1)
        return masked_TI


def carve_block(
    block: FeedForward,
    x_TH: Tensor,
    shape: CarveShape,
    *,
    residual_TH: Tensor | None = None,
) -> tuple[CarvedBlock, Tensor]:
    """Carve a block on the inputs that it sees, to answer as the dense block does.

    Args:
        block: The dense weights, float32.
        x_TH: Inputs of the block, float32.
        shape: The division.
        residual_TH: The stream to which the block's answer is added. The next block normalises
            the sum, so a token's error counts relative to its length; None counts all equally.

    Returns:
        The carved block, and its answers to the inputs, [T, H].

    Raises:
        ModelError: If the division does not fit, or a neuron were lost or used twice.
    """
    neurons = block.down_HI.shape[1]
    routed = shape.experts * shape.expert_width
    if not 0 < routed < neurons:
        raise ModelError(
            f"{shape.experts} experts of {shape.expert_width} neurons do not fit into a block of "
            f"{neurons} neurons that also needs a shared expert"
        )
    act_TI = block.activate(x_TH)
    dense_TH = act_TI @ block.down_HI.T
    weight_T = _weigh_tokens(dense_TH, residual_TH)
    gain_I = block.down_HI.norm(dim=0)
    mean_I = (act_TI.abs() * weight_T.sqrt()[:, None]).mean(0) * gain_I
    order = mean_I.argsort(descending=True, stable=True)
    shared, rest = order[: neurons - routed], order[neurons - routed :]

    step = max(1, len(x_TH) // _CLUSTER_TOKENS)
    x_some, scale_some = x_TH[::step], weight_T[::step].sqrt()[:, None]
    energy_TN = (act_TI[::step][:, rest] * gain_I[rest] * scale_some).square_()
    gate = _GateRegression(x_some)
    owner_N = _cluster(energy_TN.sqrt().T, shape)
    owner_N = _refine_owners(owner_N, energy_TN, x_some, gate, shape)

    router_EH = gate.fit(_expert_energy(energy_TN, owner_N, shape.experts)) * ROUTER_SCALE
    groups = torch.stack([rest[owner_N == e].sort().values for e in range(shape.experts)])
    carved = CarvedBlock(
        shared=shared.sort().values,
        groups_EW=groups,
        router_EH=router_EH.bfloat16().float(),
        down_HI=block.down_HI,
    )
    check_partition(carved, neurons)
    masked_TI = carved.mask_activations(act_TI, carved.route(x_TH, shape.top_k))
    down_HI = _fit_down(block.down_HI, masked_TI, dense_TH, weight_T)
    return replace(carved, down_HI=down_HI), masked_TI @ down_HI.T


def run_carved(
    block: FeedForward, carved: CarvedBlock, x_TH: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Answer of a carved block [T, H], and tokens per expert [E]."""
    chosen_TE = carved.route(x_TH, top_k)
    masked_TI = carved.mask_activations(block.activate(x_TH), chosen_TE)
    return masked_TI @ carved.down_HI.T, chosen_TE.sum(0)


def check_partition(carved: CarvedBlock, neurons: int) -> None:
    """Check that every neuron of the dense block is used exactly once.

    Raises:
        ModelError: If one is lost or used twice.
    """
    used = torch.cat([carved.shared, carved.groups_EW.flatten()])
    count_I = torch.bincount(used, minlength=neurons)
    if len(count_I) != neurons or not bool((count_I == 1).all()):
        wrong = int((count_I != 1).nonzero()[0])
        raise ModelError(f"neuron {wrong} is used {int(count_I[wrong])} times, expected once")


class _GateRegression:
    """Ridge regression from one set of inputs, factorised once, to targets that change.

    There is no intercept, since the router has none: the inputs' mean, half as long as an input,
    carries the experts' different popularity.
    """

    def __init__(self, x_TH: Tensor) -> None:
        gram = x_TH.T @ x_TH
        gram.diagonal().add_(_GATE_RIDGE * gram.diagonal().mean() + 1e-12)
        self._factor = torch.linalg.cholesky(gram)
        self._x_TH = x_TH

    def fit(self, energy_TE: Tensor) -> Tensor:
        """Weights [E, H] whose logits follow the log energies up to a token's own offset."""
        floor = energy_TE.mean() * 1e-9 + 1e-30
        target_TE = (energy_TE + floor).log_()
        target_TE -= target_TE.mean(1, keepdim=True)
        return torch.cholesky_solve(self._x_TH.T @ target_TE, self._factor).T


def _weigh_tokens(dense_TH: Tensor, residual_TH: Tensor | None) -> Tensor:
    if residual_TH is None:
        return torch.ones(len(dense_TH))
    length_T: Tensor = (residual_TH + dense_TH).norm(dim=1)
    weight_T = length_T.clamp_min(1e-6).pow(_LENGTH_POWER)
    return weight_T / weight_T.mean()


def _choose(score_TE: Tensor, top_k: int) -> Tensor:
    chosen = score_TE.topk(top_k, dim=1).indices
    return torch.zeros_like(score_TE).scatter_(1, chosen, 1.0)


def _expert_energy(energy_TN: Tensor, owner_N: Tensor, experts: int) -> Tensor:
    return energy_TN @ functional.one_hot(owner_N, experts).to(energy_TN.dtype)


def _cluster(feature_NT: Tensor, shape: CarveShape) -> Tensor:
    """Spherical k-means with equal cluster sizes on randomly projected activations: owner [N]."""
    random = torch.Generator().manual_seed(shape.seed)
    projection = torch.randn(feature_NT.shape[1], _CLUSTER_DIMENSIONS, generator=random)
    point_ND = functional.normalize(feature_NT, dim=1) @ projection
    point_ND = functional.normalize(point_ND - point_ND.mean(0), dim=1)
    first = torch.randperm(len(point_ND), generator=random)[: shape.experts]
    centre_ED = point_ND[first]
    for _ in range(_CLUSTER_ROUNDS):
        owner_N = _assign_equally(point_ND @ centre_ED.T, shape.expert_width)
        members_NE = functional.one_hot(owner_N, shape.experts).to(point_ND.dtype)
        centre_ED = functional.normalize(members_NE.T @ point_ND, dim=1)
    return owner_N


def _refine_owners(
    owner_N: Tensor,
    energy_TN: Tensor,
    x_TH: Tensor,
    gate: _GateRegression,
    shape: CarveShape,
) -> Tensor:
    """Alternate: fit the gate to the experts, then move neurons to where the gate serves them."""
    for _ in range(_REFINE_ROUNDS):
        router_EH = gate.fit(_expert_energy(energy_TN, owner_N, shape.experts))
        served_NE = energy_TN.T @ _choose(x_TH @ router_EH.T, shape.top_k)
        owner_N = _assign_equally(served_NE, shape.expert_width)
    return owner_N


def _assign_equally(score_NE: Tensor, width: int) -> Tensor:
    """Give each expert ``width`` items: the most decided items choose first, ties stable."""
    top = score_NE.topk(2, dim=1).values
    order = (top[:, 0] - top[:, 1]).argsort(descending=True, stable=True).tolist()
    preference = score_NE.argsort(dim=1, descending=True, stable=True).tolist()
    room = [width] * score_NE.shape[1]
    owner = [0] * len(order)
    for item in order:
        for expert in preference[item]:
            if room[expert]:
                room[expert] -= 1
                owner[item] = expert
                break
    return torch.tensor(owner)


def _fit_down(down_HI: Tensor, masked_TI: Tensor, target_TH: Tensor, weight_T: Tensor) -> Tensor:
    """Ridge regression of the target on the surviving activations, drawn to the dense weights."""
    weighted_TI = masked_TI * weight_T[:, None]
    gram = masked_TI.T @ weighted_TI
    gram.diagonal().add_(_DOWN_RIDGE * gram.diagonal().mean() + 1e-12)
    error_TH = target_TH - masked_TI @ down_HI.T
    change_IH = torch.cholesky_solve(weighted_TI.T @ error_TH, torch.linalg.cholesky(gram))
    return down_HI + change_IH.T
