import numpy as np
import pytest

from moeless.costs.links import LinkTimes
from moeless.costs.memory import fit_in_memory, require_memory
from moeless.costs.models import known_model
from moeless.costs.presets import DEVICES
from moeless.costs.pricing import PaperMeter, billed_gb_s, reserved_gb_s
from moeless.errors import ConfigError

SCOUT = known_model("llama-4-scout")


def test_a_load_from_the_store_passes_through_host_memory():
    links = LinkTimes(host_bytes_s=1e9, store_bytes_s=5e8, device_bytes_s=1e9)
    assert links.load_s(10**9, "host") == pytest.approx(1.0)
    assert links.load_s(10**9, "store") == pytest.approx(3.0)


def test_an_exchange_ends_with_the_device_that_has_the_most_tokens():
    links = LinkTimes.of(DEVICES["h200"])
    seconds = links.all_to_all_s(np.array([3, 900, 0]), token_bytes=8192)
    assert seconds == pytest.approx(900 * 8192 / 450e9)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_link_without_a_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="store_bytes_s"):
        LinkTimes(host_bytes_s=1, store_bytes_s=rate, device_bytes_s=1)


def test_two_replicas_of_each_expert_of_scout_do_not_fit_on_eight_48_gb_devices():
    fit = fit_in_memory(SCOUT, memory_factor=2.0, num_devices=8, device_bytes=48 * 10**9)
    assert not fit.fits
    with pytest.raises(ConfigError, match=r"1536 replicas of 0\.252 GB are 386\.5 GB; 8 devices"):
        require_memory(fit)


def test_one_replica_of_each_fits_unless_other_weights_leave_no_room():
    sizes = {"memory_factor": 1.0, "num_devices": 8, "device_bytes": 48 * 10**9}
    require_memory(fit_in_memory(SCOUT, **sizes))
    assert not fit_in_memory(SCOUT, **sizes, other_bytes=25 * 10**9).fits
    assert fit_in_memory(SCOUT, **sizes, other_bytes=50 * 10**9).seats == 0


def test_a_share_of_a_replica_is_a_whole_replica():
    fit = fit_in_memory(SCOUT, memory_factor=1.01, num_devices=8, device_bytes=48 * 10**9)
    assert fit.needed == 48 * 17


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_factor": 0},
        {"memory_factor": float("nan")},
        {"num_devices": 0},
        {"device_bytes": -1},
        {"other_bytes": -1},
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong):
    sizes = {"memory_factor": 1.0, "num_devices": 8, "device_bytes": 10**9} | wrong
    with pytest.raises(ConfigError, match="memory"):
        fit_in_memory(SCOUT, **sizes)


def test_functions_are_billed_for_the_time_of_their_devices():
    assert billed_gb_s(np.array([0.5, 0.0, 1.5]), function_bytes=10**9) == pytest.approx(2.0)


def test_reserved_devices_are_charged_idle_or_not():
    charged = reserved_gb_s(10.0, num_devices=8, device_bytes=48 * 10**9)
    assert charged == pytest.approx(3840.0)


def test_the_paper_charges_serverful_systems_all_layers_and_serverless_ones_their_own():
    serverful = PaperMeter(function_bytes=10**9, serverless=False, other_bytes=2 * 10**9)
    serverless = PaperMeter(function_bytes=10**9, serverless=True, other_bytes=2 * 10**9)
    for meter in (serverful, serverless):
        meter.add(0.5, layer_replicas=8, all_replicas=256)
        meter.add(1.5, layer_replicas=10, all_replicas=258)
    assert serverful.gb_s == pytest.approx(0.5 * 258 + 1.5 * 260)
    assert serverless.gb_s == pytest.approx(0.5 * 10 + 1.5 * 12)


def test_the_papers_accounting_refuses_what_cannot_be_charged():
    with pytest.raises(ConfigError, match="negative"):
        PaperMeter(function_bytes=-1, serverless=True)
    meter = PaperMeter(function_bytes=1, serverless=True)
    with pytest.raises(ConfigError, match="layer time is nan"):
        meter.add(float("nan"), layer_replicas=1, all_replicas=1)
