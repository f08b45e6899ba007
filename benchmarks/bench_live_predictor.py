"""What learning from live traffic costs: step times with it and without, in one run.

The demo model answers the demo's prompts on two one-thread workers. Two comparisons:

- sampling: every decode step is drawn to copy gate inputs, or not, with nobody learning from them;
- learning: in turns of a few seconds the predictor learns in its thread, or rests. It fits about
  ten times as often as when serving, so that there is something to see.

    python benchmarks/bench_live_predictor.py [--requests 16] [--rounds 4] [--seconds 120]
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from importlib import resources

import torch

from moeless.bootstrap.engine import find_model
from moeless.bootstrap.experts import ExpertsRuntime, start_experts
from moeless.bootstrap.live_predictor import LivePredictor, expect
from moeless.config import ExpertsConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.engines.transformers.gate_access import find_gates
from moeless.engines.transformers.generation.engine import TransformersTextEngine
from moeless.engines.transformers.generation.observer import GenerationObserver
from moeless.engines.transformers.generation.options import EngineOptions
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.dispatch import ExpectedLoad
from moeless.learned.live_options import LiveOptions
from moeless.telemetry.fanout import FanoutSink

TURN_S = 3.0
EAGER = LiveOptions(
    held_out_tokens=512, first_fit_tokens=256, longest_fit_interval=256, chunk_tokens=64
)


class Steps(GenerationObserver):
    """Decode times by arm; the arm of the next step is drawn when one has ended."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self.draw = draw
        self.arm = draw()
        self.seconds: dict[str, list[float]] = {}

    def step_finished(self, phase: str, tokens: int, duration_s: float) -> None:  # noqa: ARG002
        """Note it."""
        if phase == "decode":
            self.seconds.setdefault(self.arm, []).append(duration_s)
        self.arm = self.draw()


class Turns:
    """Says whose turn it is, and has the predictor rest in the others."""

    def __init__(self, live: "PausableLearning") -> None:
        self._live = live
        self._clock = time.pthread_getcpuclockid(live._thread.ident)
        self._began_s = time.perf_counter()
        self.before_s = self.cpu_s()

    def cpu_s(self) -> float:
        """CPU seconds of the thread."""
        return time.clock_gettime(self._clock)

    def draw(self) -> str:
        """The arm of the next step."""
        turn = int((time.perf_counter() - self._began_s) / TURN_S) % 2
        self._live.is_paused = turn == 0
        return ("resting", "learning")[turn]


class PausableLearning(LivePredictor):
    """Rests while it is told to."""

    is_paused = False

    def _pause(self) -> None:
        super()._pause()
        while self.is_paused and threading.current_thread() is self._thread:
            if self._stop.wait(0.01):
                break
            self._began_s = time.perf_counter()


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


def install(
    runtime: ExpertsRuntime, forecast: Callable[[int, torch.Tensor], ExpectedLoad | None]
) -> None:
    """Have the token path ask somebody else; nothing but a benchmark changes arms in a run."""
    runtime.dispatcher._forecast = forecast


def show(steps: Steps, off: str, on: str) -> None:
    """One line of figures."""
    before, after = (sorted(steps.seconds[arm]) for arm in (off, on))
    medians = [statistics.median(arm) * 1e3 for arm in (before, after)]
    # The slowest twentieth is that of other processes on this machine.
    means = [statistics.fmean(arm[: len(arm) * 19 // 20]) * 1e3 for arm in (before, after)]
    print(
        f"{on}: median {medians[1]:.2f} ms, without {medians[0]:.2f} "
        f"({medians[1] / medians[0] - 1:+.2%}); mean of the fastest 95% {means[1]:.2f}, without "
        f"{means[0]:.2f} ({means[1] / means[0] - 1:+.2%}); {len(after)} and {len(before)} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    loaded = load_engine_model(find_model(options.model))
    runtime = start_experts(
        loaded, ExpertsConfig(devices=parse_devices("cpu:2"), worker_threads=1)
    )
    gates = find_gates(loaded.model, loaded.spec.layer_ids)
    chooser = random.Random(0)
    steps = Steps(lambda: "warm-up")
    live = PausableLearning(
        gates,
        1,
        model=loaded.spec.model_id,
        clock=SystemClock(),
        sink=FanoutSink(),
        tell=lambda text: print(f"  {text}"),
        options=EAGER,
    )

    def forecast(layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
        if steps.arm == "plain":
            return expect(live.predictor, layer, x_TH)
        return live.forecast(layer, x_TH)

    install(runtime, forecast)
    limits = EngineOptions(max_batch_size=options.requests)
    texts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    try:
        with TransformersTextEngine(
            loaded.model, loaded.tokenizer, model_id="bench", options=limits, observer=steps
        ) as engine:
            prompts = [
                engine.encode_chat([{"role": "user", "content": text}])
                for text in texts.splitlines()
            ]
            prompts = [prompts[n % len(prompts)] for n in range(options.requests)]
            answer(engine, prompts, 16)
            steps.draw = lambda: chooser.choice(("plain", "sampling"))
            for _ in range(options.rounds):
                answer(engine, prompts, options.tokens)
                live.sample.take()  # nobody learns, but it must not be full
            show(steps, "plain", "sampling")

            live.start()
            turns = Turns(live)
            steps.seconds.clear()
            steps.draw = turns.draw
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < options.seconds:
                answer(engine, prompts, options.tokens)
            show(steps, "resting", "learning")
            share = (turns.cpu_s() - turns.before_s) / (time.perf_counter() - began_s)
            print(f"the thread used {2 * share:.1%} of a core while it learnt")
            live.close()
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
