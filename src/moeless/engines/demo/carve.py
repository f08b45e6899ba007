"""Carve one dense feed-forward block into a shared expert, routed experts and a gate.

Tensors in, tensors out; no training, every step in closed form or a fixed number of rounds:

1. the neurons that matter most on average become the shared expert;
2. the others are clustered by co-activation into experts of equal size, then moved between experts
   while the gate is fitted again, so that a neuron sits where the gate selects it when it matters;
3. the gate is a ridge regression from the block's input to the logarithm of each expert's energy;
4. all down projections are fitted once more to the dense answer, by ridge regression on the
   activations that survive the routing: what the unchosen experts would have added can partly
   be predicted from the others. The change is of low rank and in small integers, so that it can
   be shipped: see :class:`Correction`.

Deriving wants float64: every step that chooses (which expert, which neuron, which integer) then
chooses the same with any number of threads and on any processor, but for a tie by chance.

Knows nothing about models, files or text. Shape suffixes: T tokens, H hidden, I neurons of the
dense block, N neurons that are routed, E experts, K experts per token, W neurons per expert,
R rank of the correction.

Source: the split by importance and co-activation follows MoEfication and CMoE; moving neurons
against the fitted gate, and fitting the down projections under the routing, are ours. The best
correction of a rank is reduced-rank regression (Izenman 1975).
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
_CORRECTION_RANK = 96
_CORRECTION_LARGEST = 7
_CORRECTION_STEP = 0.35
"""Of 15 levels for a bell-shaped value, in standard deviations: least squared error."""
_LARGEST_EXPONENT = 10


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
class Correction:
    """What the fit adds to a down projection: a product of two thin matrices of small integers.

    The integers' product is exact in float64 in whatever order it is summed, and all else is one
    rounding per element: applied anywhere, it gives the same bits.

    Args:
        left_IR: Integers of the neurons, int8, -7 to 7.
        right_RH: Integers of the outputs, int8, -7 to 7.
        exponent_R: Power of two of each rank, int8, 0 to 10.
        scale_I: Scale of each neuron, float32, exactly representable in bfloat16.
        scale_H: Scale of each output, likewise.
    """

    left_IR: Tensor
    right_RH: Tensor
    exponent_R: Tensor
    scale_I: Tensor
    scale_H: Tensor

    def apply(self, down_HI: Tensor) -> Tensor:
        """The fitted down projection, float32 [H, I], from the dense one (float32 values)."""
        power_R = torch.exp2(self.exponent_R.double())
        change_IH = (self.left_IR.double() * power_R) @ self.right_RH.double()
        change_IH = change_IH * self.scale_I.double()[:, None] * self.scale_H.double()
        return (down_HI.double() + change_IH.T).float()


@dataclass(frozen=True, kw_only=True)
class CarvedBlock:
    """Result of a carving; neuron ids count in the dense block.

    Args:
        shared: Ids of the shared expert's neurons, int64 [I - E * W].
        groups_EW: Ids of each routed expert's neurons, int64.
        router_EH: Gate weights, float32, exactly representable in bfloat16.
        correction: From the dense down projection to ``down_HI``; None before the fit.
        down_HI: Fitted down projection, float32, columns in the dense block's order.
    """

    shared: Tensor
    groups_EW: Tensor
    router_EH: Tensor
    correction: Correction | None
    down_HI: Tensor

    def route(self, x_TH: Tensor, top_k: int) -> Tensor:
        """Which experts each token uses: ones and zeros, float [T, E]."""
        return _choose(x_TH @ self.router_EH.to(x_TH.dtype).T, top_k)

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
        block: The dense weights: float32 values, in float64 where the result is to be the same on
            every machine.
        x_TH: Inputs of the block, of the same type.
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
        correction=None,
        down_HI=block.down_HI.float(),
    )
    check_partition(carved, neurons)
    masked_TI = carved.mask_activations(act_TI, carved.route(x_TH, shape.top_k))
    correction = _fit_down(block.down_HI, masked_TI, dense_TH, weight_T)
    down_HI = correction.apply(block.down_HI)
    answer_TH = masked_TI @ down_HI.to(masked_TI.dtype).T
    return replace(carved, correction=correction, down_HI=down_HI), answer_TH


def run_carved(
    block: FeedForward, carved: CarvedBlock, x_TH: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Answer of a carved block [T, H], and tokens per expert [E]."""
    chosen_TE = carved.route(x_TH, top_k)
    masked_TI = carved.mask_activations(block.activate(x_TH), chosen_TE)
    return masked_TI @ carved.down_HI.to(x_TH.dtype).T, chosen_TE.sum(0)


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
        return torch.ones(len(dense_TH), dtype=dense_TH.dtype)
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
    point_ND = functional.normalize(feature_NT, dim=1) @ projection.to(feature_NT.dtype)
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


def _fit_down(
    down_HI: Tensor, masked_TI: Tensor, target_TH: Tensor, weight_T: Tensor
) -> Correction:
    """Ridge regression of the target on the surviving activations, drawn to the dense weights.

    Of all changes of that rank, the one that leaves the least error: the full solution, projected
    on the directions of the output in which it gains most.
    """
    weighted_TI = masked_TI * weight_T[:, None]
    gram = masked_TI.T @ weighted_TI
    gram.diagonal().add_(_DOWN_RIDGE * gram.diagonal().mean() + 1e-12)
    error_TH = target_TH - masked_TI @ down_HI.T
    wanted_IH = weighted_TI.T @ error_TH
    change_IH = torch.cholesky_solve(wanted_IH, torch.linalg.cholesky(gram))
    gain_HH = wanted_IH.T @ change_IH
    # Ascending, and symmetric but for rounding: one triangle is read.
    direction_HR = torch.linalg.eigh(gain_HH).eigenvectors[:, -_CORRECTION_RANK:].flip(1)
    largest = direction_HR.abs().argmax(dim=0, keepdim=True)
    direction_HR = direction_HR * direction_HR.gather(0, largest).sign()  # either sign would do
    return _round_correction(change_IH @ direction_HR, direction_HR.T)


def _round_correction(left_IR: Tensor, right_RH: Tensor) -> Correction:
    """Scales that leave values of about one standard deviation, then integers."""
    size_R = _root_mean_square(left_IR, dim=0)
    exponent_R = (size_R / size_R.min()).log2().round().clamp(0, _LARGEST_EXPONENT)
    left_IR = left_IR / torch.exp2(exponent_R)
    scale_I = (_root_mean_square(left_IR, dim=1) * _CORRECTION_STEP).bfloat16().float()
    scale_H = (_root_mean_square(right_RH, dim=0) * _CORRECTION_STEP).bfloat16().float()
    return Correction(
        left_IR=_to_integers(left_IR / scale_I[:, None]),
        right_RH=_to_integers(right_RH / scale_H),
        exponent_R=exponent_R.to(torch.int8),
        scale_I=scale_I,
        scale_H=scale_H,
    )


def _root_mean_square(values: Tensor, dim: int) -> Tensor:
    return values.square().mean(dim).sqrt().clamp_min(1e-30)


def _to_integers(values: Tensor) -> Tensor:
    return values.round().clamp(-_CORRECTION_LARGEST, _CORRECTION_LARGEST).to(torch.int8)
