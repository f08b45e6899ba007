"""What of a carving is shipped: kept whole, and refused for anything else."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moeless.engines.demo.build import describe_origin  # noqa: E402 (torch may be missing)
from moeless.engines.demo.recipe import (  # noqa: E402
    collect_recipe,
    find_shipped,
    read_recipe,
)
from moeless.engines.demo.variants import (  # noqa: E402
    DENSE_INTERMEDIATE_SIZE,
    STANDARD_VARIANTS,
    choose_variant,
)
from moeless.errors import CheckpointError, ModelError  # noqa: E402

LAYERS, HIDDEN, RANK = 2, 12, 3
VARIANT = choose_variant(16)


@pytest.fixture
def recipe():
    """Of two layers of the real width, by chance."""
    from moeless.engines.demo.carve import CarvedBlock, Correction

    random = torch.Generator().manual_seed(6)
    blocks = []
    for _ in range(LAYERS):
        order = torch.randperm(DENSE_INTERMEDIATE_SIZE, generator=random)
        routed = VARIANT.experts * VARIANT.expert_width

        def integers(*size):
            return torch.randint(-7, 8, size, generator=random, dtype=torch.int8)

        def scales(size):
            return torch.rand(size, generator=random).bfloat16().float()

        blocks.append(
            CarvedBlock(
                shared=order[routed:].sort().values,
                groups_EW=order[:routed].view(VARIANT.experts, -1).sort().values,
                router_EH=torch.randn(VARIANT.experts, HIDDEN, generator=random)
                .bfloat16()
                .float(),
                correction=Correction(
                    left_IR=integers(DENSE_INTERMEDIATE_SIZE, RANK),
                    right_RH=integers(RANK, HIDDEN),
                    exponent_R=torch.tensor([3, 1, 0], dtype=torch.int8),
                    scale_I=scales(DENSE_INTERMEDIATE_SIZE),
                    scale_H=scales(HIDDEN),
                ),
                down_HI=torch.zeros(HIDDEN, DENSE_INTERMEDIATE_SIZE),
            )
        )
    recipe = collect_recipe(describe_origin(VARIANT), blocks)
    return recipe, blocks


def test_a_recipe_gives_back_the_blocks_that_it_was_made_of(recipe, tmp_path):
    recipe, blocks = recipe
    recipe.write(tmp_path / "r.npz")
    found = read_recipe(tmp_path / "r.npz", recipe.origin)
    assert found.layers == LAYERS
    assert found.count_different_layers(recipe) == 0
    for i, block in enumerate(blocks):
        again = found.block(i, block.down_HI)
        for name in ("shared", "groups_EW", "router_EH"):
            assert torch.equal(getattr(again, name), getattr(block, name)), name
        assert torch.equal(again.down_HI, block.correction.apply(block.down_HI))


def test_recipes_that_differ_are_told_apart_layer_by_layer(recipe):
    recipe, _ = recipe
    for name in recipe.arrays:
        changed = {**recipe.arrays, name: recipe.arrays[name].copy()}
        changed[name].reshape(LAYERS, -1)[1, 0] += 1
        assert recipe.count_different_layers(replace(recipe, arrays=changed)) == 1, name


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("variant", {"variant": choose_variant(16, top_k=4)}),
        ("carving", {"carving": 1}),
        ("sha256", {"sha256": {"wheel": "another"}}),
    ],
)
def test_a_recipe_of_something_else_is_refused_in_one_line(recipe, tmp_path, key, changes):
    recipe, _ = recipe
    recipe.write(tmp_path / "r.npz")
    wanted = replace(recipe.origin, **changes)
    with pytest.raises(
        CheckpointError, match=f"r.npz was derived from {key} .*--derive"
    ) as caught:
        read_recipe(tmp_path / "r.npz", wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage", ["cut", "no archive", "pickle", "array gone", "array misshapen"]
)
def test_a_damaged_recipe_is_refused_in_one_line(recipe, tmp_path, damage):
    recipe, _ = recipe
    path = tmp_path / "r.npz"
    if damage == "array gone":
        kept = {n: a for n, a in recipe.arrays.items() if n != "scale_LH"}
        replace(recipe, arrays=kept).write(path)
    elif damage == "array misshapen":
        narrow = {**recipe.arrays, "left_LIR": recipe.arrays["left_LIR"][:, :, :2]}
        replace(recipe, arrays=narrow).write(path)
    else:
        recipe.write(path)
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:1000])
        elif damage == "no archive":
            path.write_text("recipe")
        else:
            np.savez(path, header=np.array({"a": 1}, dtype=object))
    with pytest.raises(CheckpointError, match=r"r\.npz .*--derive") as caught:
        read_recipe(path, recipe.origin)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_experts_of_unequal_width_carves_nothing(recipe):
    recipe, blocks = recipe
    owner_LI = recipe.arrays["owner_LI"].copy()
    owner_LI[0, int(blocks[0].shared[0])] = 5
    broken = replace(recipe, arrays={**recipe.arrays, "owner_LI": owner_LI})
    with pytest.raises(ModelError, match="layer 0 of the recipe has experts of unequal width"):
        broken.block(0, blocks[0].down_HI)


def test_the_standard_model_comes_with_its_recipe():
    shipped = find_shipped(describe_origin(VARIANT))
    assert shipped.layers == 30
    down_HI = torch.zeros(576, DENSE_INTERMEDIATE_SIZE)
    for layer in range(shipped.layers):
        shipped.block(layer, down_HI)


def test_other_variants_come_without_one():
    assert find_shipped(describe_origin(STANDARD_VARIANTS[8])) is None


def test_shipped_recipes_stay_small():
    from importlib.resources import files

    shipped = files("moeless.engines.demo").joinpath("recipes").iterdir()
    assert sum(path.stat().st_size for path in shipped) < 4_000_000
