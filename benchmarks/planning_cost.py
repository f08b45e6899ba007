"""What the control loop costs layers on real workers that have all cores of a machine.

Two one-thread workers compute random layers of two shapes under three policies in turns: static
placement, the default at 1.5 replicas an expert, and the same cut off from its control loop once
it has settled ("frozen"). What the default takes more than the frozen one is planning; what that
takes more than static placement is placement.

    python benchmarks/planning_cost.py --tokens 16 128
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from moeless.config import PolicyConfig
from moeless.simulator.forecasts import NoisyForecast
from moeless_experiments.measured.calibration import draw_steps
from moeless_experiments.measured.layer_shape import DEMO, MIXTRAL, LayerShape, save_random
from moeless_experiments.measured.workers import (
    LayerRunner,
    Sample,
    one_thread,
    start_workers,
)
from moeless_experiments.measured.workload import IdArray

SETTLE_STEPS, STEPS, BLOCK, TURNS = 140, 230, 5, 12
POLICIES = {"static": "static", "default": "moeless", "frozen": "moeless"}


def take_turns(shape: LayerShape, steps: list[IdArray]) -> dict[str, list[Sample]]:
    """Samples of each policy on the same steps."""
    loads_SLE = np.array(
        [[np.bincount(ids.ravel(), minlength=shape.experts) for ids in step] for step in steps]
    )
    forecast = NoisyForecast(loads_SLE.astype(np.float64), sigma=0.12, seed=0)
    expected_SLE = [forecast.expected_LE(step) for step in range(len(steps))]
    samples: dict[str, list[Sample]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder, one_thread(), ExitStack() as stack:
        loaded = save_random(shape, Path(folder), seed=0)
        runners = {}
        for name, policy in POLICIES.items():
            config = PolicyConfig(policy=policy, memory_factor=1.5)
            runtime = stack.enter_context(start_workers(loaded, config))
            runners[name] = LayerRunner(runtime, seed=0)
            runners[name].heed(expected_SLE)
            for step in range(SETTLE_STEPS):
                runners[name].run(step, steps[step])
            if name == "frozen":
                runtime.client._wants_loads = False  # nothing but a benchmark does this
        names = list(runners)
        for turn in range(TURNS):
            first = SETTLE_STEPS + turn * BLOCK
            for name in names[turn % 3 :] + names[: turn % 3]:
                # One step that does not count: caches hold what somebody else left there.
                rows = [
                    runners[name].run(step, steps[step])
                    for step in range(first - 1, first + BLOCK)
                ]
                samples[name] += [sample for row in rows[1:] for sample in row]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--skew", type=float, default=0.3, help="0.3 little, 3 much")
    options = parser.parse_args()
    heads = ("tokens", "policy", "layer", "slowest", "/ static")
    print(f"{'shape':10} " + " ".join(f"{head:>8}" for head in heads) + "  (ms)")
    for shape in (DEMO, MIXTRAL):
        for tokens in options.tokens:
            steps = draw_steps(
                [tokens] * STEPS,
                shape.experts,
                shape.top_k,
                skew=options.skew,
                drift=0.02,
                seed=1,
            )
            medians = {}
            for name, samples in take_turns(shape, list(steps)).items():
                layer_ms = np.median([sample.seconds for sample in samples]) * 1e3
                busy_ms = np.median([sample.busy_s_D.max() for sample in samples]) * 1e3
                medians[name] = layer_ms
                ratio = layer_ms / medians["static"]
                print(
                    f"{shape.name:10} {tokens:8} {name:>8} {layer_ms:8.3f} {busy_ms:8.3f} "
                    f"{ratio:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
