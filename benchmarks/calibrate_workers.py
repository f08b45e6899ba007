"""What this machine's workers cost in time, and how well the simulator foretells them.

Two one-thread workers run the experts of a random checkpoint on a calibration trace. The measured
times are fitted and written as cost models that ``moeless replay --cost-model FILE`` and ``moeless
serve --cost-model FILE`` take: ``SHAPE-POLICY.json`` is linear (base, touch, token, transfer),
``SHAPE-POLICY-table.json`` lets the time of tokens bend, as it does where kernels change with the
number of rows. Each policy has its own: where cores are few, the supervisor of a policy that
follows loads thinks at the workers' expense. The workers also run another trace, of other skew
and other batch sizes, which nothing is fitted to; both are replayed in the simulator with each
file, and the two times of every layer-step of the second one are compared.

    python benchmarks/calibrate_workers.py --out DIR [--json FILE] [--shapes demo mixtral]

The traces take turns for several rounds, so that a machine that changes its pace does so for both.
The first round is a warm-up; the lower quartile of a layer-step's other times counts, because
other processes only ever add time. Leave the machine alone meanwhile, or (as root) outrank what
runs there with ``--nice -15``.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GraniteMoeSharedConfig, MixtralConfig

from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.replays.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_runner import run_replay
from moeless.bootstrap.serving.control import build_policies, serving_cost
from moeless.bootstrap.serving.experts import ExpertsRuntime, start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.layer_cost import LayerCost
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.token_path.dispatch import ExpertDispatcher
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta, write_trace
from moeless_experiments.measured.calibration import (
    Measured,
    draw_steps,
    fit_linear,
    slowest_device,
    summarise,
    write_linear,
)
from moeless_experiments.measured.layer_shape import LAYERS
from moeless_experiments.measured.workers import Sample, Watch

DEVICES, HIDDEN = 2, 576
MEMORY_FACTOR = 1.5
KNOTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
"""Tokens of a device between which a table is linear."""
POLICIES = ("static", "moeless")
COMMON = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SHAPES = {
    "mixtral": MixtralConfig(
        **COMMON, intermediate_size=1536, num_local_experts=8, num_experts_per_tok=2
    ),
    "demo": GraniteMoeSharedConfig(
        **COMMON,
        intermediate_size=48,
        shared_intermediate_size=768,
        num_local_experts=16,
        num_experts_per_tok=8,
    ),
}
CALIBRATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
VALIDATION_TOKENS = (1, 3, 12, 48, 100, 200)


def mixed(batches: Sequence[int], seed: int) -> list[int]:
    """Batch sizes in random order, so that each finds caches as others leave them."""
    return np.random.default_rng(seed).permutation(batches).tolist()


def as_trace(steps, experts: int, top_k: int, rounds: int) -> RoutingTrace:
    """The steps in rounds, a twentieth of a second apart."""
    loads = np.array(
        [[np.bincount(ids.ravel(), minlength=experts) for ids in step] for step in steps],
        dtype=np.uint32,
    )
    loads = np.tile(loads, (rounds, 1, 1))
    return RoutingTrace(
        meta=TraceMeta(
            model="random",
            num_layers=LAYERS,
            num_experts=experts,
            top_k=top_k,
            layer_ids=tuple(range(LAYERS)),
            unit="steps",
            phase="synthetic",
            source="drawn by benchmarks/calibrate_workers.py",
            licence="Apache-2.0",
        ),
        loads_NLE=loads,
        tokens_N=(loads[:, 0].sum(axis=1) // top_k).astype(np.int32),
        time_s_N=np.arange(len(loads)) / 20,
    )


@contextmanager
def workers(directory: Path, policy: PolicyConfig, nice: int | None) -> Iterator[ExpertsRuntime]:
    """Two one-thread workers with all that is planned at first."""
    loaded = load_engine_model(directory)
    config = ExpertsConfig(
        devices=parse_devices(f"cpu:{DEVICES}"), policy=policy, worker_threads=1
    )
    runtime = start_experts(loaded, config)
    try:
        board, deadline_s = runtime.client.board, time.monotonic() + 60
        while not board.planned_LED.any() or ((board.planned_LED > 0) & ~board.warm_LED).any():
            assert time.monotonic() < deadline_s, "experts did not become warm"
            time.sleep(0.01)
        if nice is not None:
            set_priority(runtime, nice)
        yield runtime
    finally:
        runtime.close()


def set_priority(runtime: ExpertsRuntime, nice: int) -> None:
    """Give this process and the workers a priority, all threads of theirs."""
    for pid in [os.getpid(), *runtime.client.report()["worker_pids"]]:
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():  # where the system shares time by session, a thread's own is not enough
            group.write_text(str(nice))
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def run_steps(runtime: ExpertsRuntime, steps, rounds: int) -> list[list[Sample]]:
    """Run steps in rounds; the samples of each layer-step, but for the first round's [N]."""
    spec, policy = runtime.spec, runtime.config.policy
    cost = serving_cost(spec.expert, ["cpu"] * DEVICES, policy.cost_model)
    splitter = build_policies(policy, cost=cost, clock=SystemClock()).splitter
    watch = Watch(splitter, runtime.invoker)
    dispatcher = ExpertDispatcher(spec, client=runtime.client, invoker=watch, splitter=watch)
    x_TH = torch.randn(max(step.shape[1] for step in steps), HIDDEN).to(
        getattr(torch, spec.expert.dtype)
    )
    samples: list[list[Sample]] = [[] for _ in range(len(steps) * LAYERS)]
    for round_ in range(rounds):
        for number, step in enumerate(steps):
            ids_LTK = torch.from_numpy(step)
            weights_TK = torch.full(ids_LTK.shape[1:], 1 / spec.top_k)
            for layer in range(LAYERS):
                began_s = time.perf_counter()
                dispatcher(layer, x_TH[: step.shape[1]], ids_LTK[layer], weights_TK)
                seconds = time.perf_counter() - began_s
                if round_:
                    sample = Sample(seconds, watch.busy_s_D, watch.share_ED)
                    samples[number * LAYERS + layer].append(sample)
    return samples


def fit_table(measured: Measured, linear: LayerCost, experts: int) -> dict[str, object]:
    """Device times as touch x (experts touched) + a rising broken line of the tokens."""
    from scipy.optimize import nnls

    tokens_N, touched_N = slowest_device(
        measured, linear.base_s, linear.touch_s, linear.token_s + 2 * linear.transfer_s
    )
    knots_A = np.array([knot for knot in KNOTS if knot <= tokens_N.max()], dtype=np.float64)
    steps_NA = np.clip(
        (tokens_N[:, None] - knots_A[:-1]) / np.diff(knots_A), 0, [1] * (len(knots_A) - 2) + [99]
    )
    matrix = np.column_stack([np.ones_like(tokens_N), touched_N, steps_NA])
    found, _ = nnls(matrix / measured.seconds_N[:, None], np.ones_like(tokens_N))
    line_A = found[0] + np.concatenate([[0.0], np.cumsum(found[2:])])
    touched_B = np.arange(1, experts + 1)
    seconds_AB = line_A[:, None] + found[1] * touched_B
    return {
        "tokens": knots_A.tolist(),
        "touched": touched_B.tolist(),
        "seconds": seconds_AB.tolist(),
    }


def write_models(
    measured: Measured, files: dict[str, Path], label: str, experts: int
) -> LayerCost:
    """Fit both models and write them; returns the linear one."""
    linear = fit_linear(measured)
    write_linear(linear, files[""], label)
    table = fit_table(measured, linear, experts)
    files["-table"].write_text(json.dumps({"label": label, **table}, indent=1))
    return linear


def simulate(trace_file: Path, spec, policy: str, cost_model: Path, rounds: int) -> np.ndarray:
    """Simulated seconds of each layer-step, the middle of its rounds [N]."""
    task = ReplayTask(
        routing=trace_file,
        policies=(policy,),
        devices=DEVICES,
        prediction="previous",
        cost_model=str(cost_model),
        expert_shape=f"{spec.expert.hidden}x{spec.expert.intermediate}",
        options=PolicyOptions(memory_factor=MEMORY_FACTOR),
    )
    layer_s_SL = run_replay(prepare_replay(task), jobs=1)[policy].layer_s_SL
    rounds_RN = layer_s_SL.reshape(rounds, -1)
    return np.median(rounds_RN[1:], axis=0)


def calibrate_shape(name: str, args, folder: Path) -> list[dict[str, object]]:
    """Measure, fit, write and validate one shape; a row per policy, model and batch size."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)
    spec = load_engine_model(folder).spec
    shape = (spec.num_experts, spec.top_k)
    calibration = [
        step
        for seed, skew in enumerate((0.3, 1.0, 3.0))
        for step in draw_steps(
            mixed(CALIBRATION_TOKENS * 3, seed), *shape, skew=skew, drift=0.5, seed=seed
        )
    ]
    batches = mixed(VALIDATION_TOKENS * args.steps, 9)
    validation = list(draw_steps(batches, *shape, skew=1.5, drift=0.1, seed=9))
    trace_file = folder / "trace.npz"
    write_trace(as_trace(calibration + validation, *shape, args.rounds), trace_file)
    rows = []
    for policy in POLICIES:
        config = {"policy": policy, "predictor": "previous", "memory_factor": MEMORY_FACTOR}
        files = {model: args.out / f"{name}-{policy}{model}.json" for model in ("", "-table")}
        label = f"measured: {DEVICES} workers, {name} experts, policy {policy}"
        for steps, rounds in ((calibration, 3), (calibration + validation, args.rounds)):
            with workers(folder, PolicyConfig(**config), args.nice) as runtime:
                samples = run_steps(runtime, steps, rounds)
            fitted = summarise(calibration, samples[: len(calibration) * LAYERS])
            linear = write_models(fitted, files, label, spec.num_experts)
            # The first fit is what the policy goes by while the second one's times are taken.
            config["cost_model"] = str(files[""])
        measured = summarise(validation, samples[len(calibration) * LAYERS :])
        for model, file in files.items():
            simulated_N = simulate(trace_file, spec, policy, file, args.rounds)
            found = compare(measured, simulated_N[len(calibration) * LAYERS :])
            about = {"shape": name, "policy": policy, "model": model.lstrip("-") or "linear"}
            rows += [{**about, **row} for row in found]
        print(f"{name}, {policy}: {describe(linear)}", flush=True)
    return rows


def compare(measured: Measured, simulated_N: np.ndarray) -> list[dict[str, object]]:
    """Relative errors by batch size, and of all layer-steps."""
    error_N = simulated_N / measured.seconds_N - 1.0
    rows = []
    for batch in (*sorted(set(measured.batch_N.tolist())), None):
        chosen_N = measured.batch_N == batch if batch else measured.batch_N > 0
        rows.append(
            {
                "tokens": batch,
                "measured_s": float(np.median(measured.seconds_N[chosen_N])),
                "simulated_s": float(np.median(simulated_N[chosen_N])),
                "median_error": float(np.median(np.abs(error_N[chosen_N]))),
                "bias": float(np.median(error_N[chosen_N])),
            }
        )
    return rows


def describe(cost: LayerCost) -> str:
    """The coefficients in microseconds."""
    return ", ".join(
        f"{key[:-2]} {1e6 * value:.3g} us"
        for key, value in asdict(cost).items()
        if key.endswith("_s")
    )


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """As a table; times are medians in milliseconds."""
    print("shape    policy   model   tokens  measured simulated  median error    bias")
    for row in rows:
        print(
            f"{row['shape']:8} {row['policy']:8} {row['model']:7} {row['tokens'] or 'all':>6}"
            f" {1e3 * row['measured_s']:9.3f} {1e3 * row['simulated_s']:9.3f}"
            f" {row['median_error']:13.1%} {row['bias']:+7.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the cost models")
    parser.add_argument("--json", type=Path, help="also write the comparison here")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9, help="of each trace, 2 or more")
    parser.add_argument("--steps", type=int, default=8, help="validation steps of each batch size")
    parser.add_argument("--nice", type=int, help="priority of this process and the workers")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for name in args.shapes:
            with tempfile.TemporaryDirectory() as folder:
                rows += calibrate_shape(name, args, Path(folder))
    print_rows(rows)
    if args.json:
        args.json.write_text(json.dumps({"dtype": args.dtype, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
