import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from moeless.errors import MissingExtraError
from moeless.telemetry.metric_table import METRICS, render_metric_table
from moeless.telemetry.metrics import RuntimeCollector, layer_groups, register_runtime
from moeless.telemetry.percentiles import SampleWindow
from moeless.telemetry.snapshot import GbSeconds, PredictorState, RuntimeSnapshot, Timing

prometheus_client = pytest.importorskip("prometheus_client")


def snapshot():
    layers, experts, devices = 8, 2, 2
    accuracy = np.full(layers, np.nan)
    accuracy[2:4] = [0.5, 1.0]
    return RuntimeSnapshot(
        model="demo",
        devices=("cpu:0", "cpu:1"),
        steps=3,
        tokens_LE=np.full((layers, experts), 5),
        replicas_LED=np.ones((layers, experts, devices), dtype=np.uint8),
        planned_LED=np.ones((layers, experts, devices), dtype=np.uint8),
        device_tokens_LD=np.full((layers, devices), 5),
        straggler_mean_L=np.ones(layers),
        straggler_last_L=np.arange(1.0, layers + 1),
        warm_starts=10,
        cold_starts=4,
        cold_starts_L=np.array([4] + [0] * (layers - 1)),
        warm_starts_L=np.ones(layers),
        blocking_loads=1,
        evictions=2,
        plans=24,
        plans_early_share=0.9,
        replicas_warm_share=1.0,
        plan_s=Timing(count=24, total_s=0.3, p50_s=0.01, p99_s=0.02),
        split_s=Timing(),
        prediction_accuracy_L=accuracy,
        predictor=PredictorState(kind="auto", distance=2, swaps=3),
        instances_D={"warm": (3, 1), "loading": (0, 1)},
        resident_bytes_D=(300, 100),
        budget_bytes_D=(1000, 1000),
        gb_s=GbSeconds(billed=0.5, resident=1.0, reserved=2.0),
        gb_s_L={"billed": (0.0625,) * layers},
        worker_restarts_D=(0, 1),
        failed_loads_D=(0, 2),
        events_lost=6,
        loaded_bytes_D=(300, 500),
        loading_s_D=(0.5, 2.0),
        cold_start_s_D=(Timing(), Timing(count=5, total_s=2.5, p50_s=0.4, p99_s=0.9)),
        device_speed_D=(1.0, 0.25),
        planned_speed_D=(1.0, 0.5),
    )


@pytest.fixture
def registry():
    registry = prometheus_client.CollectorRegistry()
    register_runtime(registry, snapshot)
    return registry


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("function_cold_starts_total", {}, 4),
        ("function_warm_starts_total", {}, 10),
        ("function_blocking_loads_total", {}, 1),
        ("failed_loads_total", {"device": "cpu:1"}, 2),
        ("events_lost_total", {}, 6),
        ("loaded_bytes_total", {"device": "cpu:1"}, 500),
        ("loading_seconds_total", {"device": "cpu:0"}, 0.5),
        ("cold_start_seconds", {"device": "cpu:1", "quantile": "0.5"}, 0.4),
        ("cold_start_seconds_count", {"device": "cpu:1"}, 5),
        ("cold_start_seconds_sum", {"device": "cpu:1"}, 2.5),
        ("cold_start_seconds_count", {"device": "cpu:0"}, 0),
        ("device_speed", {"device": "cpu:1"}, 0.25),
        ("device_planned_speed", {"device": "cpu:1"}, 0.5),
        ("function_instances", {"device": "cpu:0", "state": "warm"}, 3),
        ("expert_tokens_total", {"layer_group": "0-1"}, 20),
        ("layer_straggler_ratio", {"layer_group": "6-7"}, 7.5),
        ("plan_seconds", {"quantile": "0.99"}, 0.02),
        ("plan_seconds_count", {}, 24),
        ("plan_seconds_sum", {}, 0.3),
        ("split_seconds_count", {}, 0),
        ("prediction_accuracy", {"layer_group": "2-3"}, 0.75),
        ("prediction_accuracy", {"layer_group": "0-1"}, None),
        ("predictor_info", {"kind": "auto"}, 1),
        ("predictor_info", {"kind": "gate"}, None),
        ("predictor_swaps_total", {}, 3),
        ("billed_gb_seconds_total", {}, 0.5),
        ("resident_gb_seconds_total", {}, 1.0),
        ("reserved_gb_seconds_total", {}, 2.0),
        ("device_memory_bytes", {"device": "cpu:1", "state": "resident"}, 100),
        ("worker_restarts_total", {"device": "cpu:1"}, 1),
    ],
)
def test_a_scrape_has_the_snapshot_s_values(registry, name, labels, value):
    assert registry.get_sample_value(f"moeless_{name}", {"model": "demo", **labels}) == value


def test_every_metric_of_the_table_is_exposed_as_described(registry):
    text = prometheus_client.generate_latest(registry).decode()
    for metric in METRICS:
        assert f"# TYPE {metric.exposed_name} {metric.kind}\n" in text
        assert f"| `{metric.exposed_name}` | {metric.kind} |" in render_metric_table()


def test_registering_takes_no_snapshot():
    def explode():
        raise AssertionError("asked too early")

    register_runtime(prometheus_client.CollectorRegistry(), explode)


def test_without_a_model_there_are_no_metrics():
    assert list(RuntimeCollector(lambda: None).collect()) == []


def test_a_missing_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'moeless\[serve\]'"):
        RuntimeCollector(snapshot)


@pytest.mark.parametrize("layers", [1, 3, 30, 61])
def test_layer_groups_cover_every_layer_once(layers):
    groups = layer_groups(layers)
    assert [i for _, part in groups for i in range(layers)[part]] == list(range(layers))
    assert len(groups) == min(4, layers)


def test_a_snapshot_is_strict_json_with_plain_keys():
    data = json.loads(json.dumps(snapshot().to_dict(), allow_nan=False))
    assert (data["layers"], data["experts"], data["devices"]) == (8, 2, ["cpu:0", "cpu:1"])
    assert data["tokens"][0] == [5, 5]
    assert data["prediction_accuracy"][:3] == [None, None, 0.5]
    assert data["plan_s"] == {"count": 24, "total_s": 0.3, "p50_s": 0.01, "p99_s": 0.02}
    assert data["predictor"] == {"kind": "auto", "distance": 2, "source": None, "swaps": 3}
    assert data["cold_start_s"][1]["count"] == 5
    assert data["instances"] == {"warm": [3, 1], "loading": [0, 1]}
    assert data["gb_s"]["reserved"] == 2.0


def test_arrays_that_are_not_known_everywhere_are_strict_json():
    expected_LE = np.full((8, 2), np.nan)
    expected_LE[0] = [1.0, 2.5]
    data = replace(snapshot(), expected_LE=expected_LE).to_dict()
    assert data["expected"][:2] == [[1.0, 2.5], [None, None]]
    assert data["actual"] is None


def test_a_timing_summarises_a_window():
    window = SampleWindow()
    window.extend([1.0, 3.0])
    assert Timing.of(window) == Timing(count=2, total_s=4.0, p50_s=2.0, p99_s=2.98)
