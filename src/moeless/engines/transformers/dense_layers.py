"""The layers of a loaded model that are not experts, computed as experts are on a CPU.

Linear layers, gated MLPs, norms and a tied embedding are replaced, one module by another, in the
model that was loaded and in no other. Their weights lie in panels, once: what several layers read
in the same step (queries, keys and values; gates and ups) is one product. The result of each row
depends on that row alone, to the bit, whatever else is in the batch.

What a replacement does not know stays as it is: other devices and dtypes, subclasses of these
layers, MLPs of another form.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moeless.functions.compute.panels import (
    GATED_MODES,
    PanelMatrix,
    PanelShape,
    Products,
    way_for,
)
from moeless.functions.compute.rows import rms_norm
from moeless.functions.compute.tiles import COLUMNS

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu"}
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def lay_out_dense(model: Any) -> bool:
    """Replace the layers of a model whose parameters are on the CPU and of one dtype.

    Args:
        model: A causal language model in evaluation mode, without its experts.

    Returns:
        Whether it was done: there is a way to multiply its dtype.
    """
    name = str(model.dtype).removeprefix("torch.")
    devices = {parameter.device.type for parameter in model.parameters()}
    way = way_for(name) if devices == {"cpu"} else None
    if way is None:
        return False
    products = Products(way)
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for module in list(model.modules()):
        _replace_children(module, model.dtype, products)
    if is_tied and type(embedding) is nn.Embedding:
        laid_out = model.get_output_embeddings()
        if isinstance(laid_out, PanelLinear):
            model.set_input_embeddings(PanelEmbedding(embedding, laid_out.matrix))
    return True


def _replace_children(module: nn.Module, dtype: torch.dtype, products: Products) -> None:
    if _is_gated_mlp(module) and all(p.dtype == dtype for p in module.parameters()):
        return  # replaced in its parent
    for names in _JOINED:
        siblings: list[Any] = [getattr(module, name, None) for name in names]
        if all(_can_lay_out(sibling, dtype) for sibling in siblings):
            joined = _JoinedProduct(siblings, products)
            for place, name in enumerate(names):
                setattr(module, name, _JoinedPart(joined, place))
    children: list[tuple[str, Any]] = list(module.named_children())
    for name, child in children:
        if _is_gated_mlp(child) and all(p.dtype == dtype for p in child.parameters()):
            setattr(module, name, PanelMlp(child, products))
        elif _can_lay_out(child, dtype):
            setattr(module, name, PanelLinear(child, products))
        elif type(child).__name__.endswith("RMSNorm") and _is_plain_norm(child):
            setattr(module, name, RowNorm(child))


def _can_lay_out(module: Any, dtype: torch.dtype) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == dtype


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is the usual one: a weight and an epsilon, nothing else."""
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and isinstance(getattr(module, "variance_epsilon", None), float)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether it computes ``down(silu(gate(x)) * up(x))`` by one of two known sets of layers."""
    return _mlp_parts(module) is not None


def _mlp_parts(module: nn.Module) -> tuple[list[Any], Any] | None:
    """Gate and up, apart or joined, and down."""
    children: dict[str, Any] = dict(module.named_children())
    activation = children.pop("act_fn", None) or children.pop("activation", None)
    if _ACTIVATIONS.get(type(activation).__name__) is None:
        return None
    if any(type(child) is not nn.Linear for child in children.values()):
        return None
    for firsts, last in (
        (("gate_proj", "up_proj"), "down_proj"),
        (("input_linear",), "output_linear"),
    ):
        if set(children) == {*firsts, last}:
            layers = [children[name] for name in firsts]
            if all(layer.bias is None for layer in children.values()):
                return layers, children[last]
    return None


def _padded_bias(bias: torch.Tensor | None, shape: PanelShape) -> torch.Tensor | None:
    if bias is None:
        return None
    whole = torch.zeros(shape.panels * COLUMNS)
    whole[: len(bias)] = bias.detach().float()
    return whole


class PanelLinear(nn.Module):
    """A linear layer in panels.

    Args:
        linear: The layer that it replaces.
        products: Multiplies.
    """

    def __init__(self, linear: nn.Linear, products: Products) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.matrix = PanelMatrix.of(linear.weight.detach())
        self._bias = _padded_bias(linear.bias, self.matrix.shape)
        self._products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        y = self._products.linear(rows, self.matrix, bias=self._bias)
        return y.view(*x.shape[:-1], self.out_features)


class _JoinedProduct:
    """One product for several linear layers that are called with the same input in turn."""

    def __init__(self, linears: Sequence[nn.Linear], products: Products) -> None:
        self.widths = [linear.out_features for linear in linears]
        self.depth = linears[0].in_features
        shape = PanelShape(
            width=sum(self.widths),
            depth=self.depth,
            dtype=str(linears[0].weight.dtype).removeprefix("torch."),
        )
        memory = torch.zeros(shape.weight_bytes + shape.slack_bytes, dtype=torch.uint8)
        self._matrix = PanelMatrix(shape, memory)
        begin = 0
        for linear in linears:
            self._matrix.write(linear.weight.detach(), begin=begin)
            begin += linear.out_features
        biases = [linear.bias for linear in linears]
        self._bias = None
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(width) if bias is None else bias.detach().float()
                for bias, width in zip(biases, self.widths, strict=True)
            ]
            self._bias = _padded_bias(torch.cat(parts), shape)
        self._products = products
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []

    def part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """One layer's output; the others' are kept until they are asked for with that input."""
        if x is not self._input:
            rows = x.reshape(-1, self.depth)
            y = self._products.linear(rows.contiguous(), self._matrix, bias=self._bias)
            self._parts = list(torch.split(y.view(*x.shape[:-1], -1), self.widths, dim=-1))
            self._input = x
        part = self._parts[place]
        if place == len(self.widths) - 1:
            self._input, self._parts = None, []
        return part


class _JoinedPart(nn.Module):
    """One of the layers of a joined product."""

    def __init__(self, joined: _JoinedProduct, place: int) -> None:
        super().__init__()
        self._joined, self._place = joined, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joined.part(x, self._place)


class PanelMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` in two products.

    Args:
        mlp: What it replaces.
        products: Multiplies.
    """

    def __init__(self, mlp: nn.Module, products: Products) -> None:
        super().__init__()
        parts = _mlp_parts(mlp)
        assert parts is not None
        firsts, last = parts
        dtype = str(last.weight.dtype).removeprefix("torch.")
        self._inner = last.in_features
        self._shape = PanelShape(
            width=self._inner, depth=firsts[0].in_features, dtype=dtype, gated=True
        )
        num_bytes = self._shape.weight_bytes + self._shape.slack_bytes
        self._gate_up = PanelMatrix(self._shape, torch.zeros(num_bytes, dtype=torch.uint8))
        weights = torch.cat([first.weight.detach() for first in firsts])
        self._gate_up.write(weights[: self._inner])
        self._gate_up.write(weights[self._inner :], ups=True)
        self._down = PanelMatrix.of(last.weight.detach())
        self._products = products
        self._inner_dtype = torch.bfloat16 if products.way.halves else torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to the same."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        inner = self._products.linear(
            rows, self._gate_up, mode=GATED_MODES["silu"], out_dtype=self._inner_dtype
        )
        y = self._products.linear(inner, self._down, out_dtype=x.dtype)
        return y.view(x.shape)


class RowNorm(nn.Module):
    """A root-mean-square norm by compiled loops.

    Args:
        norm: The module that it replaces.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self._weight: Any = norm.weight.detach().float().numpy()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] to the same."""
        return rms_norm(hidden_states, self._weight, self.variance_epsilon)


class PanelEmbedding(nn.Module):
    """Rows of a matrix in panels, which is the output layer's, too.

    Args:
        embedding: What it replaces.
        matrix: Its weight.
    """

    def __init__(self, embedding: nn.Embedding, matrix: PanelMatrix) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._matrix = matrix

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [...] to rows [..., H]."""
        rows = self._matrix.rows(input_ids.reshape(-1).numpy())
        return rows.view(*input_ids.shape, self.embedding_dim)
