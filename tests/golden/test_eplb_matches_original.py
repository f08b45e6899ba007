"""Our EPLB against outputs of DeepSeek's (see make_eplb_golden.py)."""

from pathlib import Path

import numpy as np
import pytest

from moeless.policies.planners.eplb_rebalance import rebalance_experts

GOLDEN = Path(__file__).with_name("data") / "eplb_original.npz"


def cases():
    with np.load(GOLDEN, allow_pickle=False) as data:
        for i in range(len(data.files) // 4):
            load, shape = data[f"{i}/load"], data[f"{i}/shape"].tolist()
            name = f"{load.shape[1]} experts, {load.dtype}, {shape}, {i}"
            slots, stable = data[f"{i}/slots"], data[f"{i}/stable"]
            yield pytest.param(load, shape, slots, stable, id=name)


EVERY_CASE = pytest.mark.parametrize(("load", "shape", "slots", "stable"), list(cases()))


def ours(load, shape, **options):
    slots, groups, nodes, devices = shape
    return rebalance_experts(
        load,
        num_slots=slots,
        num_devices=devices,
        num_groups=groups,
        num_nodes=nodes,
        **options,
    )


def counts(slots_LR, experts):
    return np.stack([np.bincount(row, minlength=experts) for row in slots_LR])


def device_loads(load_LE, slots_LR, devices):
    share_LE = load_LE / np.maximum(counts(slots_LR, load_LE.shape[1]), 1)
    return np.take_along_axis(share_LE, slots_LR, axis=1).reshape(len(load_LE), devices, -1).sum(2)


def has_ties(load):
    return load.dtype != np.float32


def test_the_example_of_the_original_s_readme_comes_out_to_the_slot():
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    assert ours(load, (16, 4, 2, 8)).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@EVERY_CASE
def test_every_slot_is_the_original_s_once_its_sort_is_stable(load, shape, slots, stable):
    assert (ours(load, shape, single_precision=True) == stable).all()


@EVERY_CASE
def test_without_ties_every_slot_is_the_original_s_as_published(load, shape, slots, stable):
    # With ties the published code depends on what torch's unstable sort does on the machine.
    if not has_ties(load):
        assert (ours(load, shape, single_precision=True) == slots).all()


@EVERY_CASE
def test_replica_counts_and_device_loads_are_the_original_s(load, shape, slots, stable):
    mine = ours(load, shape, single_precision=True)
    assert (counts(mine, load.shape[1]) == counts(slots, load.shape[1])).all()
    np.testing.assert_allclose(
        device_loads(load, mine, shape[3]), device_loads(load, slots, shape[3]), rtol=1e-5
    )


@EVERY_CASE
def test_double_precision_only_renumbers_equally_loaded_devices(load, shape, slots, stable):
    # Two sums of thirds may be equal in one precision and not in the other.
    mine = ours(load, shape)
    assert (counts(mine, load.shape[1]) == counts(slots, load.shape[1])).all()
    np.testing.assert_allclose(
        np.sort(device_loads(load, mine, shape[3])),
        np.sort(device_loads(load, slots, shape[3])),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("load", "slots", "devices", "balancedness"),
    [
        ([800, 0, 0, 0, 0, 0, 0, 0], 16, 8, 0.563),
        ([500, 300, 10, 10, 10, 10, 10, 10], 16, 8, 0.717),
        ([1000, 500] + [1] * 14, 24, 8, 0.660),
        ([420, 390, 180, 120, 90, 60, 50, 40], 16, 8, 0.900),
        ([10] * 8, 12, 4, 1.0),
    ],
)
def test_its_balancedness_on_small_inputs_is_the_original_s(load, slots, devices, balancedness):
    load = np.array([load])
    load_D = device_loads(load, ours(load, (slots, 1, 1, devices)), devices)[0]
    assert load_D.mean() / load_D.max() == pytest.approx(balancedness, abs=5e-4)


def test_without_any_load_the_original_gives_all_spare_slots_to_the_first_expert():
    assert counts(ours(np.zeros((1, 8)), (16, 1, 1, 8)), 8)[0].tolist() == [9] + [1] * 7
