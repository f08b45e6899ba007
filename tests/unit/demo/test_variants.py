"""Shapes of the demo model."""

import pytest

from moeless.engines.demo.variants import (
    DENSE_INTERMEDIATE_SIZE,
    STANDARD_VARIANTS,
    DemoVariant,
    choose_variant,
)
from moeless.errors import ConfigError


@pytest.mark.parametrize(
    "variant", [*STANDARD_VARIANTS.values(), DemoVariant(experts=16, shared_fraction=0.5)]
)
def test_widths_are_multiples_of_eight_and_use_all_neurons(variant):
    assert variant.expert_width % 8 == 0
    assert variant.shared_width % 8 == 0
    used = variant.shared_width + variant.experts * variant.expert_width
    assert used == DENSE_INTERMEDIATE_SIZE


def test_what_is_left_open_comes_from_the_standard_variant():
    assert choose_variant(8) == DemoVariant(experts=8, top_k=6, shared_fraction=0.25)
    narrow = choose_variant(8, top_k=2, shared_fraction=0.5)
    assert (narrow.top_k, narrow.shared_width) == (2, 768)


def test_variants_that_differ_have_different_names():
    variants = [
        *STANDARD_VARIANTS.values(),
        choose_variant(8, top_k=2, shared_fraction=0.5),
        choose_variant(16, shared_fraction=0.5),
        choose_variant(16, seed=1),
    ]
    assert len({variant.name for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 12}, "experts is 12"),
        ({"experts": 16, "top_k": 17}, "top-k is 17"),
        ({"experts": 16, "top_k": 0}, "top-k is 0"),
        ({"experts": 16, "shared_fraction": 1.0}, "shared-fraction is 1.0"),
        ({"experts": 32, "shared_fraction": 0.001}, "need more than the 1536 neurons"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        choose_variant(**wrong)
