"""The recipe of a carving: all that deriving decides, small enough to be shipped.

Which expert owns which neuron, the gates, and the correction of the down projections. Together
with the dense model it gives the carved one, to the bit and in seconds; deriving it takes minutes
(``moeless demo-model build --derive``). A recipe names the wheel, the variant and the texts that
it was derived from, and is refused for others. Knows tensors and files, no model.

A new recipe is shipped by deriving it and copying ``moeless-recipe.npz`` to
``recipes/NAME.npz``, NAME as the variant has it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from moeless.engines.demo.carve import CarvedBlock, Correction, check_partition
from moeless.engines.demo.variants import DemoVariant
from moeless.errors import CheckpointError, ModelError

RECIPE_NAME: Final = "moeless-recipe.npz"
"""File beside the weights of a model whose recipe was derived on this machine."""

_SHARED: Final = 255
_HEADER: Final = "header"
_TYPES: Final = {
    "owner_LI": np.uint8,
    "router_LEH": np.uint16,
    "left_LIR": np.int8,
    "right_LRH": np.int8,
    "exponent_LR": np.int8,
    "scale_LI": np.uint16,
    "scale_LH": np.uint16,
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a recipe was derived from; it fits nothing else.

    Args:
        variant: The division.
        carving: Version of the carving's mathematics.
        sha256: Of the wheel and of the calibration texts.
    """

    variant: DemoVariant
    carving: int
    sha256: Mapping[str, str]

    def describe(self) -> dict[str, Any]:
        """As the header of a file holds it."""
        return {**asdict(self), "sha256": dict(self.sha256)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A carving of all layers.

    Args:
        origin: What it was derived from.
        arrays: By name: ``owner_LI`` (expert of each neuron, 255 the shared one), ``router_LEH``,
            and the correction's ``left_LIR``, ``right_LRH``, ``exponent_LR``, ``scale_LI`` and
            ``scale_LH``. Values of 16 bits are the bits of bfloat16.
    """

    origin: Origin
    arrays: Mapping[str, np.ndarray]

    @property
    def layers(self) -> int:
        """Layers that it carves."""
        return len(self.arrays["owner_LI"])

    def block(self, layer: int, down_HI: Tensor) -> CarvedBlock:
        """The carving of a layer, from its dense down projection in float32.

        Raises:
            ModelError: If it does not use every neuron once.
        """
        got = {name: torch.from_numpy(array[layer]) for name, array in self.arrays.items()}
        owner_I = got["owner_LI"]
        experts = self.origin.variant.experts
        groups = [(owner_I == expert).nonzero().flatten() for expert in range(experts)]
        if any(len(group) != self.origin.variant.expert_width for group in groups):
            raise ModelError(f"layer {layer} of the recipe has experts of unequal width")
        correction = Correction(
            left_IR=got["left_LIR"],
            right_RH=got["right_LRH"],
            exponent_R=got["exponent_LR"],
            scale_I=_from_bits(got["scale_LI"]),
            scale_H=_from_bits(got["scale_LH"]),
        )
        carved = CarvedBlock(
            shared=(owner_I == _SHARED).nonzero().flatten(),
            groups_EW=torch.stack(groups),
            router_EH=_from_bits(got["router_LEH"]),
            correction=correction,
            down_HI=correction.apply(down_HI),
        )
        check_partition(carved, len(owner_I))
        return carved

    def count_different_layers(self, other: "Recipe") -> int:
        """Layers in which two recipes of equal shape are not the same to the bit."""
        same_L = np.ones(self.layers, dtype=bool)
        for name, array in self.arrays.items():
            theirs = other.arrays[name]
            same_L &= (array == theirs).reshape(self.layers, -1).all(axis=1)
        return int((~same_L).sum())

    def write(self, path: Path) -> None:
        """Write one compressed .npz, without pickles."""
        header = np.array(json.dumps(self.origin.describe(), sort_keys=True))
        held: dict[str, Any] = {_HEADER: header, **self.arrays}
        with path.open("wb") as file:
            np.savez_compressed(file, **held)


def collect_recipe(origin: Origin, blocks: Sequence[CarvedBlock]) -> Recipe:
    """The recipe of carved blocks, in the order of their layers."""
    return Recipe(
        origin=origin,
        arrays={
            "owner_LI": np.stack([_owners(block) for block in blocks]),
            "router_LEH": _stack_bits([block.router_EH for block in blocks]),
            "left_LIR": _stack([_correction(block).left_IR for block in blocks]),
            "right_LRH": _stack([_correction(block).right_RH for block in blocks]),
            "exponent_LR": _stack([_correction(block).exponent_R for block in blocks]),
            "scale_LI": _stack_bits([_correction(block).scale_I for block in blocks]),
            "scale_LH": _stack_bits([_correction(block).scale_H for block in blocks]),
        },
    )


def find_shipped(origin: Origin) -> Recipe | None:
    """The recipe that this release ships for a variant; None if it ships none.

    Raises:
        CheckpointError: If it ships one that was derived from something else.
    """
    shipped = files("moeless.engines.demo").joinpath("recipes", f"{origin.variant.name}.npz")
    if not shipped.is_file():
        return None
    with as_file(shipped) as path:
        return read_recipe(path, origin)


def read_recipe(path: Path, origin: Origin) -> Recipe:
    """Read a recipe for what it is to be applied to.

    Raises:
        CheckpointError: If it is not a recipe, or was derived from something else.
    """
    next_step = "derive it again with 'moeless demo-model build --derive'"
    try:
        with np.load(path, allow_pickle=False) as held:
            header = json.loads(str(held[_HEADER]))
            arrays = {name: held[name] for name in held.files if name != _HEADER}
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} is not a recipe of a carving ({reason}); {next_step}"
        ) from error
    wanted = origin.describe()
    for key in wanted:
        if header.get(key) != wanted[key]:
            raise CheckpointError(
                f"{path} was derived from {key} {header.get(key)}, not from {wanted[key]}; "
                f"{next_step}"
            )
    if wrong := _find_misshapen(arrays, origin.variant):
        raise CheckpointError(f"{path} has no fitting array {wrong}; {next_step}")
    return Recipe(origin=origin, arrays=arrays)


def _find_misshapen(arrays: Mapping[str, np.ndarray], variant: DemoVariant) -> str | None:
    """The first array whose type or shape does not fit to the others."""
    for name, wanted_type in _TYPES.items():
        if name not in arrays or arrays[name].dtype != wanted_type:
            return name
    size = {"E": variant.experts}
    for name in _TYPES:
        letters = name.rpartition("_")[2]
        if arrays[name].ndim != len(letters):
            return name
        for letter, found in zip(letters, arrays[name].shape, strict=True):
            if size.setdefault(letter, found) != found:
                return name
    return None


def _correction(block: CarvedBlock) -> Correction:
    assert block.correction is not None, "a block without its fit has no recipe"
    return block.correction


def _owners(block: CarvedBlock) -> np.ndarray:
    owner_I = np.full(block.down_HI.shape[1], _SHARED, dtype=np.uint8)
    for expert, group in enumerate(block.groups_EW):
        owner_I[group.numpy()] = expert
    return owner_I


def _stack(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.stack(list(tensors)).numpy()


def _stack_bits(tensors: Sequence[Tensor]) -> np.ndarray:
    return _stack([tensor.bfloat16().view(torch.int16) for tensor in tensors]).view(np.uint16)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.bfloat16).float()
