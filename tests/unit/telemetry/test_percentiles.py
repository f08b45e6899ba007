import pytest

from moeless.telemetry.percentiles import SampleWindow, percentiles, summarise


def test_percentiles_interpolate_between_order_statistics():
    assert percentiles([4.0, 1.0, 3.0, 2.0], (0, 50, 100)) == {"p0": 1.0, "p50": 2.5, "p100": 4.0}


def test_a_fractional_point_keeps_its_name():
    assert list(percentiles([1.0], (99.9,))) == ["p99.9"]


def test_no_samples_give_zeros():
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0}
    assert summarise([]) == {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}


def test_nan_is_refused():
    with pytest.raises(ValueError, match="1 of 2 samples are NaN"):
        percentiles([1.0, float("nan")])


def test_a_summary_has_mean_and_maximum():
    assert summarise([1.0, 2.0, 6.0]) == pytest.approx(
        {"mean": 3.0, "p50": 2.0, "p99": 5.92, "max": 6.0}
    )


def test_a_window_forgets_old_samples_but_counts_all():
    window = SampleWindow(size=3)
    window.extend([100.0, 1.0, 2.0, 3.0])
    assert (window.count, window.total) == (4, 106.0)
    assert window.percentiles((0, 100)) == {"p0": 1.0, "p100": 3.0}


def test_an_empty_window_gives_zeros():
    assert SampleWindow().percentiles() == {"p50": 0.0, "p99": 0.0}
