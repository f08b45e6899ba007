"""Small traces and machines for replays."""

import numpy as np

from moeless.bootstrap.policies import PolicyOptions, build_policy_set, max_replicas
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.costs.linear import LinearTime
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import NoisyForecast
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta

EXPERT = ExpertShape(hidden=10, intermediate=10)
"""600 bytes."""

COST = LayerCost(token_s=1e-3, transfer_s=1e-4)


def make_trace(loads_SLE, *, time_s=None, top_k=1, unit="steps", predicted=None, model="tiny"):
    """A trace of given loads; every layer of a step must have equally many tokens."""
    loads_SLE = np.asarray(loads_SLE, dtype=np.uint32)
    steps, layers, experts = loads_SLE.shape
    tokens_S = (loads_SLE[:, 0].sum(axis=1) // top_k).astype(np.int32)
    if time_s is None:
        time_s = np.arange(steps, dtype=np.float64)
    return RoutingTrace(
        meta=TraceMeta(
            model=model,
            num_layers=layers,
            num_experts=experts,
            top_k=top_k,
            layer_ids=tuple(range(layers)),
            unit=unit,
            phase="prefill",
            source="made up",
            licence="none",
            predictor=None if predicted is None else {"kind": "made up", "distance": 1},
        ),
        loads_NLE=loads_SLE,
        tokens_N=tokens_S,
        time_s_N=np.asarray(time_s, dtype=np.float64) if unit == "steps" else None,
        predicted_NLE=None if predicted is None else np.asarray(predicted, dtype=np.float32),
    )


def draw_trace(*, steps=40, layers=3, experts=8, top_k=2, tokens=64, seed=0, **options):
    """A trace of skewed loads that drift slowly; tokens per step vary."""
    rng = np.random.default_rng(seed)
    weight_LE = rng.gamma(1.0, size=(layers, experts)) + 0.05
    loads_SLE = np.zeros((steps, layers, experts), dtype=np.uint32)
    for step in range(steps):
        weight_LE *= np.exp(0.05 * rng.standard_normal(weight_LE.shape))
        count = int(rng.integers(tokens // 2, tokens + 1))
        for layer in range(layers):
            # The K largest of perturbed log weights are K different experts, drawn by weight.
            score_TE = np.log(weight_LE[layer]) + rng.gumbel(size=(count, experts))
            chosen_TK = np.argsort(-score_TE, axis=1)[:, :top_k]
            loads_SLE[step, layer] = np.bincount(chosen_TK.ravel(), minlength=experts)
    return make_trace(loads_SLE, top_k=top_k, **options)


def run(trace, name, *, devices=4, cost=COST, forecast="exact", memory_factor=2.0, **config):
    """Replay a policy on a small machine whose devices hold all that the factor asks for."""
    options = PolicyOptions(
        memory_factor=memory_factor, eplb_interval_s=10.0, swift_interval_s=5.0
    )
    clock = SimulatedClock()
    experts, layers = trace.meta.num_experts, trace.meta.num_layers
    history = forecast if forecast in ("previous", "ewma") else "previous"
    look = None
    if forecast not in ("previous", "ewma"):
        sigma = 0.0 if forecast == "exact" else float(forecast)
        look = NoisyForecast(trace.loads_NLE, sigma=sigma, seed=0)
    defaults = {
        "num_devices": devices,
        "device_bytes": (experts + 1) * layers * EXPERT.num_bytes,
        "expert": EXPERT,
        "load_s": 0.01,
        "lookahead": 0 if look is None else 1,
        "max_replicas": max_replicas(name, options, num_experts=experts, num_devices=devices),
        "keep_replicas": True,
    }
    return replay_policy(
        trace,
        build_policy_set(name, cost=cost, options=options, clock=clock, history=history),
        clock=clock,
        time_model=LinearTime(cost=cost, label="test"),
        forecast=look,
        keep_alive=FixedKeepAlive(config.pop("keep_s", float("inf"))),
        config=ReplayConfig(**(defaults | config)),
    )
