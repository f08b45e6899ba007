"""Where the time of a decode step goes: a real engine in this process, without HTTP.

Sequences decode greedily while every part of the step is clocked, less what it calls that has a
group of its own. Two clocks: the wall's, and the engine thread's processor. Where the first is
well above the second in the experts' row, the engine waited for workers or for threads that help;
where that is so in all rows, the machine was busy with something else.

    python benchmarks/profile_decode.py --invoker inline --devices cpu:1 --streams 16
    python benchmarks/profile_decode.py --invoker process --devices cpu:2 --threads 1 --csv FILE

Clocking costs some microseconds for each of a few hundred calls in a step: shares are what to
read, and speed is shown of unclocked steps, too. HTTP's part is what `bench_serving.py` has less.
"""

import argparse
import csv
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from bench_serving import outranking
from provenance import provenance

from moeless.bootstrap.serving.engine import RunningEngine, start_engine
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.errors import MoelessError

LINEAR, NORM = "linear layers", "norms"
ATTENTION = "attention: rope, cache, softmax"
ELEMENTWISE = "elementwise and Python of the layers"
ROUTER = "router"
DISPATCH = "experts: count, split, combine"
LOOK_AHEAD = "experts: look ahead, announce"
POST = "experts: post and ring"
COMPUTE = "experts: compute, or wait for workers"
MODEL = "model: embedding, masks, positions"
CHOOSE = "choose tokens, text, delivery"
BETWEEN = "between steps"
GROUPS = (
    *(LINEAR, NORM, ATTENTION, ELEMENTWISE, ROUTER, DISPATCH, LOOK_AHEAD, POST, COMPUTE),
    *(MODEL, CHOOSE, BETWEEN),
)


class Clocks:
    """Exclusive times of nested calls of one thread, by group."""

    def __init__(self) -> None:
        self.wall_ns: dict[str, int] = defaultdict(int)
        self.cpu_ns: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._open: list[str] = [BETWEEN]
        self._last = 0, 0

    def clear(self) -> None:
        """Forget everything."""
        self.wall_ns.clear()
        self.cpu_ns.clear()
        self.calls.clear()

    def _switch(self) -> None:
        """What has passed since the last switch goes to the group on top."""
        now = time.perf_counter_ns(), time.thread_time_ns()
        self.wall_ns[self._open[-1]] += now[0] - self._last[0]
        self.cpu_ns[self._open[-1]] += now[1] - self._last[1]
        self._last = now

    def wrap(self, call: Callable[..., Any], group: str) -> Callable[..., Any]:
        """A function whose time is the group's, but for what is wrapped within."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(group)
            self.calls[group] += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return clocked


def group_of(module: Any, name: str) -> str:
    """The group of a module's own time, by its class and name."""
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return NORM
    if name.endswith(("router", "gate")):
        return ROUTER
    if "experts" in kind:
        return DISPATCH
    if "linear" in kind or name.endswith(("_proj", "_linear", "lm_head")):
        return LINEAR
    if "attention" in kind or "rotary" in kind:
        return ATTENTION
    if "embedding" in kind or name.count(".") < 2:
        return MODEL
    return ELEMENTWISE


@contextmanager
def clocked(running: RunningEngine, clocks: Clocks) -> Iterator[None]:
    """Clock the parts of an engine while the context lasts.

    Args:
        running: An engine without work, so that nothing is under way.
        clocks: Receive the times.
    """
    engine: Any = running.engine
    dispatcher: Any = running.experts.dispatcher
    loop, announcer = engine._loop, dispatcher._announcer
    parts: list[tuple[Any, str, str]] = [
        (module, "forward", group_of(module, name))
        for name, module in engine.model.named_modules()
        if type(module).__name__ != "ModuleList"
    ]
    parts += [
        *((running.experts.invoker, "begin", POST), (running.experts.invoker, "finish", COMPUTE)),
        *((announcer, "take", LOOK_AHEAD), (announcer, "announce", LOOK_AHEAD)),
        *((loop, "step", CHOOSE), (loop._runner, "decode", MODEL)),
    ]
    changed = []
    for owner, name, group in parts:
        own = vars(owner).get(name)
        changed.append((owner, name, own))
        setattr(owner, name, clocks.wrap(getattr(owner, name), group))
    try:
        yield
    finally:
        for owner, name, own in changed:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def decode(
    running: RunningEngine, streams: int, tokens: int, watch: Callable[[int], None]
) -> None:
    """Have sequences make tokens, all at the same time.

    Args:
        running: The engine.
        streams: Sequences.
        tokens: Of each.
        watch: Called with the number of each token of the last sequence, from 1.
    """
    engine = running.engine
    prompts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    lines = prompts.splitlines()
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    requests = [
        GenerationRequest(
            request_id=f"{time.monotonic_ns()}-{i}",
            prompt_ids=tuple(
                engine.encode_chat([{"role": "user", "content": lines[i % len(lines)]}])
            ),
            sampling=sampling,
        )
        for i in range(streams)
    ]
    answers = [engine.submit(request) for request in requests]
    for event in answers[-1]:
        if event.error:
            raise SystemExit(f"profile_decode: {event.error}")
        watch(event.completion_tokens)
    for answer in answers[:-1]:
        for _ in answer:
            pass


class Pace:
    """Seconds from a token on, so that prompts do not count."""

    def __init__(self, first: int, began: Callable[[], None] = lambda: None) -> None:
        self._first, self._began = first, began
        self._began_s = self.seconds = 0.0
        self.steps = 0

    def __call__(self, token: int) -> None:
        """A token has come."""
        now_s = time.perf_counter()
        if token == self._first:
            self._began_s = now_s
            self._began()
        elif token > self._first:
            self.seconds, self.steps = now_s - self._began_s, token - self._first


def to_rows(clocks: Clocks, steps: int) -> list[dict[str, Any]]:
    """Groups with their milliseconds in a step, calls in a step, and shares."""
    whole_ns = sum(clocks.wall_ns.values())
    return [
        {
            "group": group,
            "calls": round(clocks.calls[group] / steps, 1),
            "wall_ms": round(clocks.wall_ns[group] / steps / 1e6, 3),
            "share": round(clocks.wall_ns[group] / whole_ns, 4),
            "engine_cpu_ms": round(clocks.cpu_ns[group] / steps / 1e6, 3),
        }
        for group in GROUPS
    ]


def profile(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the engine, and print what a step takes."""
    experts = ExpertsConfig(
        devices=parse_devices(args.devices),
        invoker=args.invoker,
        policy=PolicyConfig(policy=args.policy),
        worker_threads=args.worker_threads,
    )
    engine = EngineConfig(
        model=args.model, dtype=args.dtype, max_batch_size=args.streams, threads=args.threads
    )
    clocks = Clocks()
    running = start_engine(engine, experts, progress=lambda text: print(f"# {text}"))
    plain, slowed = Pace(2), Pace(2, clocks.clear)
    try:
        with outranking(os.getpid(), args.nice):
            for _ in range(2):  # so that plans and their pace have settled
                decode(running, args.streams, args.tokens, lambda _: None)
            decode(running, args.streams, args.tokens, plain)
            with clocked(running, clocks):
                decode(running, args.streams, args.tokens, slowed)
    finally:
        running.close()
    speed = args.streams * plain.steps / plain.seconds
    per_step_ms = slowed.seconds / slowed.steps * 1e3
    print(
        f"{args.invoker}, {args.devices}, {args.dtype}, {args.policy}, {args.streams} streams: "
        f"{speed:.1f} tokens/s ({plain.seconds / plain.steps * 1e3:.1f} ms a step; "
        f"{per_step_ms:.1f} while clocked)"
    )
    rows = to_rows(clocks, slowed.steps)
    print(f"{'':40} {'calls':>6} {'ms':>8} {'share':>6} {'engine CPU ms':>14}")
    for row in rows:
        print(
            f"{row['group']:40} {row['calls']:6.0f} {row['wall_ms']:8.2f} {row['share']:6.1%} "
            f"{row['engine_cpu_ms']:14.2f}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument("--invoker", choices=["inline", "process"], default="inline")
    parser.add_argument("--devices", default="cpu:1", help="as serve takes it")
    parser.add_argument("--policy", default=PolicyConfig().policy, help="as serve takes it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--threads", type=int, help="of the engine; default: as serve has it")
    parser.add_argument("--worker-threads", type=int, help="of each worker")
    parser.add_argument(
        "--nice", type=int, help="below 0 (as root) outranks what runs here, which it starves"
    )
    parser.add_argument("--csv", type=Path, help="the groups are written here")
    args = parser.parse_args()
    if args.streams < 1 or args.tokens < 4:
        parser.error("--streams must be at least 1, --tokens at least 4")
    try:
        rows = profile(args)
    except MoelessError as error:
        print(f"profile_decode: {error}", file=sys.stderr)
        return 2
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            file.write(provenance("measured") + "\n")
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
