"""What learning from live traffic costs, counted in one run: no comparison of noisy step times.

The demo model answers the demo's prompts on two one-thread workers. Counted are the processor time
of each call that notes gate inputs on the token path, the wall and processor time of the engine's
thread in the same steps, and the processor time of the thread that learns.

    python benchmarks/bench_live_predictor.py [--batches 1 16] [--tokens 64] [--rounds 2]
"""

import argparse
import time
from collections import defaultdict
from importlib import resources
from typing import NamedTuple

import torch

from moeless.bootstrap.serving.engine import find_model
from moeless.bootstrap.serving.experts import start_experts
from moeless.bootstrap.serving.live_predictor import LivePredictor
from moeless.config import ExpertsConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.engines.transformers.gate_access import find_gates, observed_layer_inputs
from moeless.engines.transformers.generation.engine import TransformersTextEngine
from moeless.engines.transformers.generation.observer import GenerationObserver
from moeless.engines.transformers.generation.options import EngineOptions
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.token_path.announcer import LookAhead
from moeless.learned.live_sample import LiveSample
from moeless.telemetry.fanout import FanoutSink


class CountedSample(LiveSample):
    """Counts the processor time of its notes."""

    cpu_s = 0.0
    notes = 0

    def note(self, layer: int, x_TH: torch.Tensor) -> None:
        """As in any sample."""
        before_s = time.thread_time()
        super().note(layer, x_TH)
        self.cpu_s += time.thread_time() - before_s
        self.notes += 1


class Cost(NamedTuple):
    """Of some steps.

    Args:
        steps: How many.
        wall_s: Their time.
        cpu_s: Of the engine's thread.
        note_s: Part of it that noted gate inputs.
    """

    steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    note_s: float = 0.0

    def plus(self, wall_s: float, cpu_s: float, note_s: float) -> "Cost":
        """One step more."""
        return Cost(self.steps + 1, self.wall_s + wall_s, self.cpu_s + cpu_s, self.note_s + note_s)


class Steps(GenerationObserver):
    """Costs by phase and tokens."""

    def __init__(self, sample: CountedSample, clock_s: float) -> None:
        self.found: dict[str, Cost] = defaultdict(Cost)
        self._sample, self._clock_s = sample, clock_s
        self._before: tuple[float, float, int] | None = None

    def step_finished(self, phase: str, tokens: int, duration_s: float) -> None:
        """Note it; called on the engine's thread."""
        now_s, sample = time.thread_time(), self._sample
        if self._before is not None:
            cpu_s, note_s, notes = self._before
            # Reading the clock twice shows some time that no note took.
            counted_s = sample.cpu_s - note_s - (sample.notes - notes) * self._clock_s
            kind = phase if phase == "decode" else f"{phase}, {tokens} tokens"
            self.found[kind] = self.found[kind].plus(duration_s, now_s - cpu_s, counted_s)
        self._before = (now_s, sample.cpu_s, sample.notes)


def clock_s() -> float:
    """What two readings of the clock one after the other show."""
    return min(-time.thread_time() + time.thread_time() for _ in range(1000))


def answer(engine: TransformersTextEngine, prompts: list[list[int]], tokens: int) -> None:
    """Have all prompts answered at once."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [
        GenerationRequest(request_id=f"{n}", prompt_ids=tuple(ids), sampling=sampling)
        for n, ids in enumerate(prompts)
    ]
    for stream in [engine.submit(request) for request in requests]:
        for event in stream:
            assert not event.error, event.error


def show(name: str, cost: Cost) -> None:
    """One line of figures."""
    print(
        f"{name}: {cost.steps} steps of {1e3 * cost.wall_s / cost.steps:.1f} ms, engine thread "
        f"{1e3 * cost.cpu_s / cost.steps:.1f} ms; noting {1e6 * cost.note_s / cost.steps:.0f} us: "
        f"{cost.note_s / cost.wall_s:.2%} of the time, {cost.note_s / cost.cpu_s:.2%} of the "
        "engine thread's processor time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(1)
    loaded = load_engine_model(find_model(options.model))
    runtime = start_experts(
        loaded, ExpertsConfig(devices=parse_devices("cpu:2"), worker_threads=1)
    )
    gates = find_gates(loaded.model, loaded.spec.layer_ids)
    live = LivePredictor(
        gates,
        1,
        model=loaded.spec.model_id,
        clock=SystemClock(),
        sink=FanoutSink(),
        tell=lambda text: print(f"  {text}"),
    )
    sample = live.sample = CountedSample(len(gates) + 1)
    announce = runtime.dispatcher.announce_first_layers
    # Nothing but a benchmark changes who is asked while it runs.
    runtime.dispatcher._announcer._look_ahead = LookAhead(
        distance=1,
        forecast=live.forecast,
        forecast_first=live.forecast_first,
        notice=live.notice,
    )
    steps = Steps(sample, clock_s())
    limits = EngineOptions(max_batch_size=max(options.batches))
    texts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    live.start()
    learner = time.pthread_getcpuclockid(live._thread.thread.ident)
    try:
        with (
            observed_layer_inputs(loaded.model, [0], lambda _, x_TH: announce(x_TH)),
            TransformersTextEngine(
                loaded.model, loaded.tokenizer, model_id="bench", options=limits, observer=steps
            ) as engine,
        ):
            prompts = [
                engine.encode_chat([{"role": "user", "content": text}])
                for text in texts.splitlines()
            ]
            prompts = [prompts[n % len(prompts)] for n in range(max(options.batches))]
            answer(engine, prompts, 8)
            for batch in options.batches:
                steps.found.clear()
                began_s, learnt_s = time.perf_counter(), time.clock_gettime(learner)
                for _ in range(options.rounds):
                    answer(engine, prompts[:batch], options.tokens)
                took_s = time.perf_counter() - began_s
                learnt_s = time.clock_gettime(learner) - learnt_s
                for name, cost in steps.found.items():
                    show(f"{batch} at once, {name}", cost)
                spent = sum(cost.cpu_s for cost in steps.found.values())
                print(
                    f"  learning: {learnt_s / took_s:.2%} of a core beside it, "
                    f"{learnt_s / spent:.2%} of the engine thread's processor time"
                )
            print(
                f"steps left out: {sample.saved_steps} to keep to the share, "
                f"{sample.left_out_steps} because enough waited"
            )
            live.close()
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
