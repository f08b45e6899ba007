"""Records what DeepSeek's own EPLB gives: ``python tests/golden/make_eplb_golden.py EPLB_PY``.

EPLB_PY is ``eplb.py`` of https://github.com/deepseek-ai/EPLB (MIT); it is run, not copied. Needs
torch. The result is ``data/eplb_original.npz`` beside this file. Each case i has ``i/load``
[N, E], ``i/shape`` (slots, groups, nodes, devices), ``i/slots`` [N, R] as the original gives them
on this machine, and ``i/stable`` [N, R], the same with its sort made stable.
"""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

OUT = Path(__file__).with_name("data") / "eplb_original.npz"
ROWS = 6

README = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
# experts, slots, groups, nodes, devices
SHAPES = [
    (8, 16, 1, 1, 8),
    (8, 8, 1, 1, 8),
    (10, 12, 1, 1, 4),
    (16, 24, 1, 1, 8),
    (16, 20, 3, 2, 4),
    (12, 16, 4, 2, 8),
    (64, 96, 8, 4, 16),
    (64, 128, 1, 1, 8),
    (256, 288, 8, 4, 32),
    (256, 320, 1, 1, 64),
]


def random_loads(kind: str, experts: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "fractions":  # no two alike
        return rng.random((ROWS, experts)).astype(np.float32)
    if kind == "few tokens":  # many ties
        return rng.integers(0, 6, (ROWS, experts))
    if kind == "tokens":
        return rng.integers(0, 5000, (ROWS, experts))
    popularity = np.arange(1, experts + 1) ** -1.0
    return rng.multinomial(4096, rng.permutation(popularity / popularity.sum()), ROWS)


def stable_sort(tensor: torch.Tensor, dim: int, *, descending: bool) -> object:
    return torch.sort(tensor, dim=dim, descending=descending, stable=True)


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("eplb", path)
    assert spec is not None
    assert spec.loader is not None
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    rng = np.random.default_rng(0)
    cases = [(np.array(README), (16, 4, 2, 8))]
    for experts, *shape in SHAPES:
        for kind in ("fractions", "few tokens", "tokens", "skewed"):
            cases.append((random_loads(kind, experts, rng), tuple(shape)))
    arrays = {}
    for i, (load, shape) in enumerate(cases):
        weight = torch.from_numpy(load)
        slots = original.rebalance_experts(weight, *shape)[0].numpy()
        with mock.patch.object(torch.Tensor, "sort", stable_sort):
            stable = original.rebalance_experts(weight, *shape)[0].numpy()
        small = load if load.dtype == np.float32 else load.astype(np.uint16)
        arrays |= {
            f"{i}/load": small,
            f"{i}/shape": np.array(shape),
            f"{i}/slots": slots.astype(np.int16),
            f"{i}/stable": stable.astype(np.int16),
        }
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
