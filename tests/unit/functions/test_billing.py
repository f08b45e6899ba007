"""Bytes times seconds, layer by layer."""

import pytest

from moeless.functions.accounts.billing import ResidencyMeter


def test_bytes_count_from_when_they_come_until_they_leave():
    meter = ResidencyMeter(2, now_s=100.0)
    meter.add_bytes(0, 3_000_000_000, now_s=110.0)
    meter.add_bytes(1, 1_000_000_000, now_s=111.0)
    meter.add_bytes(0, -2_000_000_000, now_s=112.0)
    assert meter.gb_s_L(now_s=112.0) == pytest.approx([6.0, 1.0])
    assert meter.gb_s_L(now_s=115.0) == pytest.approx([9.0, 4.0])


def test_asking_changes_nothing():
    meter = ResidencyMeter(1, now_s=0.0)
    meter.add_bytes(0, 1_000_000_000, now_s=0.0)
    for _ in range(3):
        assert meter.gb_s_L(now_s=2.0) == pytest.approx([2.0])
    meter.add_bytes(0, -1_000_000_000, now_s=2.0)
    assert meter.gb_s_L(now_s=50.0) == pytest.approx([2.0])
