"""A small trace, replayed: figures must not change unnoticed.

To accept new figures after a deliberate change, run this file as a program and review the diff.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.replays.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_process import replay_job
from moeless.bootstrap.replays.replay_runner import describe_job, metrics_config
from moeless.simulator.metrics import measure_policy
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta, write_trace

GOLDEN = Path(__file__).parent / "data" / "replay_metrics.json"
POLICIES = ("static", "eplb", "swift", "paper", "moeless", "oracle")
STEPS, LAYERS, EXPERTS, TOP_K = 60, 3, 8, 2


def make_golden_trace():
    """Loads that drift, from arithmetic alone: the same whatever generator numpy has."""
    loads_SLE = np.zeros((STEPS, LAYERS, EXPERTS), dtype=np.uint32)
    for step in range(STEPS):
        tokens = 40 + 13 * (step % 7) if step % 20 != 19 else 0
        for layer in range(LAYERS):
            weight_E = [3 + (5 * e + 7 * layer + step // 4) % 11 for e in range(EXPERTS)]
            loads_SLE[step, layer] = _apportion(tokens * TOP_K, weight_E)
    return RoutingTrace(
        meta=TraceMeta(
            model="golden",
            num_layers=LAYERS,
            num_experts=EXPERTS,
            top_k=TOP_K,
            layer_ids=tuple(range(LAYERS)),
            unit="steps",
            phase="prefill (made up)",
            source="arithmetic",
            licence="Apache-2.0",
        ),
        loads_NLE=loads_SLE,
        tokens_N=(loads_SLE[:, 0].sum(axis=1) // TOP_K).astype(np.int32),
        time_s_N=np.arange(STEPS) * 0.5,
    )


def _apportion(total, weight_E):
    """Whole shares of a total; what is left over goes to the first."""
    share_E = [total * weight // sum(weight_E) for weight in weight_E]
    for expert in range(total - sum(share_E)):
        share_E[expert] += 1
    return share_E


def measure(directory):
    path = Path(directory) / "golden.npz"
    write_trace(make_golden_trace(), path)
    result = {}
    for cost_model in ("paper", "h200"):
        prepared = prepare_replay(
            ReplayTask(
                routing=path,
                policies=POLICIES,
                devices=4,
                cost_model=cost_model,
                expert_shape="4096x14336",
                options=PolicyOptions(eplb_interval_s=8.0, swift_interval_s=4.0),
            )
        )
        for name in POLICIES:
            recording = replay_job(
                describe_job(prepared, name), prepared.trace, on_step=lambda _: None
            )
            figures = measure_policy(
                recording, prepared.trace.loads_NLE, config=metrics_config(prepared, name)
            )
            for measured in ("plan_us", "split_us"):
                del figures[measured]
            figures["search"] = figures["search"]["count"]
            result[f"{cost_model}/{name}"] = figures
    return result


def _flat(figures, prefix=""):
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def test_figures_are_those_that_were_committed(tmp_path):
    found = dict(_flat(measure(tmp_path)))
    expected = dict(_flat(json.loads(GOLDEN.read_text(encoding="utf-8"))))
    assert found.keys() == expected.keys()
    different = {
        key: (found[key], expected[key])
        for key in expected
        if found[key] != pytest.approx(expected[key], rel=1e-9, abs=1e-12)
    }
    assert different == {}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(measure(folder), indent=1)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
