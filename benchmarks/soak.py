"""Serve while workers are killed, stopped and throttled, and compare with serving in peace.

A real server (`moeless serve`, float32, greedy) gets the same open-loop arrivals twice: in peace,
then with a seeded series of faults. Every answer is held against the one that the same prompt got
alone. An answer that differs is wrong unless the two best logits were closer than 1e-4 where
it begins to differ.

    python benchmarks/soak.py --minutes 20 --faults 40 --arrivals AzureLLMInferenceTrace_conv.csv
    python benchmarks/soak.py --minutes 2 --faults 8            arrivals drawn at random

Exit code 1: a request failed, an answer was wrong, a worker was left stopped, or, in runs of ten
minutes or more, memory grew.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np
import psutil
from openai import AsyncOpenAI, OpenAIError
from provenance import provenance

from moeless.errors import MoelessError
from moeless.workloads.arrivals import read_arrivals

CLOSE_LOGITS = 1e-4
MEMORY_MAY_GROW = 0.03
MEMORY_FROM_MINUTES = 10.0
"""Shorter runs end before caches have their size: their memory is reported, not judged."""
SETTLE_S = 15.0
REQUEST_TIMEOUT_S = 120.0
FAULTS = ("kill", "hang", "pause", "throttle")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a prompt gets alone.

    Args:
        tokens: Its answer, token by token.
        gaps: Between the best and the second-best logit at each token.
    """

    tokens: list[str]
    gaps: list[float]


@dataclass(kw_only=True)
class Outcome:
    """What became of the requests of one run."""

    first_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    same: int = 0
    close_calls: int = 0
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """For the report."""

        def tail(values: list[float]) -> dict[str, float]:
            if not values:
                return {}
            return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 99)}

        return {
            "requests": self.same + self.close_calls + len(self.wrong) + len(self.failures),
            "failed": len(self.failures),
            "same": self.same,
            "differ_at_a_close_call": self.close_calls,
            "wrong": len(self.wrong),
            "ttft_s": tail(self.first_s),
            "tpot_s": tail(self.per_token_s),
            "examples": (self.failures + self.wrong)[:5],
        }


class Server:
    """`moeless serve` in a process group of its own, and the workers below it."""

    def __init__(self, model: str, options: list[str], log: Path) -> None:
        command = [sys.executable, "-m", "moeless", "serve", model, "--port", "0"]
        command += ["--dtype", "float32", "--devices", "cpu:2", *options]
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "serving " in line:
                self.url = line.split(" on ", 1)[1].split(" ", 1)[0]
                return
        raise SystemExit(f"the server ended before it was ready; see {log}")

    def family(self) -> list[psutil.Process]:
        """Engine, supervisor and workers."""
        engine = psutil.Process(self.process.pid)
        return [engine, *engine.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """The workers that are there now."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if "moeless.functions.worker" in process.cmdline():
                    found.append(process)
        return found

    def resident_bytes(self) -> int:
        """Private and shared memory of all of them, shared pages counted once (PSS)."""
        total = 0
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def stop(self) -> float:
        """End it as an operator would; returns the seconds that took."""
        family, began_s = self.family(), time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        seconds = time.monotonic() - began_s
        for left in family:
            with contextlib.suppress(psutil.Error):
                left.kill()
        self._log.close()
        return seconds


async def ask_alone(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> Reference:
    """The answer that all others are held against."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    gaps = [abs(c.top_logprobs[0].logprob - c.top_logprobs[1].logprob) for c in content]
    return Reference(tokens=[c.token for c in content], gaps=gaps)


async def ask(
    client: AsyncOpenAI, model: str, prompt: str, max_tokens: int, known: Reference, out: Outcome
) -> None:
    """One streamed request, judged."""
    began_s, first_s, tokens = time.perf_counter(), 0.0, []
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            logprobs=True,
            stream=True,
        )
        async for chunk in stream:
            if not chunk.choices or chunk.choices[0].logprobs is None:
                continue
            first_s = first_s or time.perf_counter() - began_s
            tokens += [c.token for c in chunk.choices[0].logprobs.content or []]
    except (OpenAIError, OSError) as error:
        out.failures.append(f"{type(error).__name__}: {error}"[:200])
        return
    seconds = time.perf_counter() - began_s
    out.first_s.append(first_s)
    if len(tokens) > 1:
        out.per_token_s.append((seconds - first_s) / (len(tokens) - 1))
    if tokens == known.tokens:
        out.same += 1
        return
    pairs = zip(tokens, known.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None and known.gaps[at] < CLOSE_LOGITS:
        out.close_calls += 1
    else:
        out.wrong.append(f"{prompt[:40]!r}: differs at token {at} of {len(known.tokens)}")


async def run_load(
    client: AsyncOpenAI,
    model: str,
    references: dict[str, Reference],
    at_s: list[float],
    max_tokens: int,
    seed: int,
) -> Outcome:
    """Send requests at their times, whatever has become of the earlier ones."""
    outcome, chance, began_s = Outcome(), random.Random(seed), time.monotonic()
    prompts, running = list(references), []
    for when_s in at_s:
        await asyncio.sleep(max(0.0, began_s + when_s - time.monotonic()))
        prompt = chance.choice(prompts)
        known = references[prompt]
        running.append(asyncio.create_task(ask(client, model, prompt, max_tokens, known, outcome)))
    await asyncio.gather(*running)
    return outcome


async def do_faults(server: Server, minutes: float, count: int, seed: int) -> list[dict]:
    """Do something to a worker every now and then; each kind as often as any other."""
    chance = random.Random(seed)
    kinds = [FAULTS[i % len(FAULTS)] for i in range(count)]
    chance.shuffle(kinds)
    done, began_s = [], time.monotonic()
    for number, kind in enumerate(kinds):
        due_s = (number + chance.random()) * minutes * 60 / count
        await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
        workers = server.workers()
        if not workers:
            await asyncio.sleep(1.0)
            workers = server.workers()
        if not workers:
            done.append({"kind": kind, "at_s": due_s, "victim": None})
            continue
        victim = chance.choice(workers)
        done.append({"kind": kind, "at_s": round(due_s, 1), "victim": victim.pid})
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            await FAULT[kind](victim)
    return done


async def kill(victim: psutil.Process) -> None:
    """It is gone at once."""
    victim.kill()


async def hang(victim: psutil.Process) -> None:
    """It never moves again; somebody has to notice."""
    victim.suspend()


async def pause(victim: psutil.Process) -> None:
    """It stands still, and goes on before anybody gives it up."""
    victim.suspend()
    await asyncio.sleep(1.0)
    victim.resume()


async def throttle(victim: psutil.Process) -> None:
    """It gets a quarter of its time for some seconds."""
    until_s = time.monotonic() + 4.0
    while time.monotonic() < until_s:
        victim.suspend()
        await asyncio.sleep(0.06)
        victim.resume()
        await asyncio.sleep(0.02)


FAULT = {"kill": kill, "hang": hang, "pause": pause, "throttle": throttle}


async def watch_memory(server: Server, samples: list[tuple[float, int]]) -> None:
    """Note what all processes hold, every two seconds."""
    began_s = time.monotonic()
    while True:
        samples.append((time.monotonic() - began_s, server.resident_bytes()))
        await asyncio.sleep(2.0)


def arrival_times(args: argparse.Namespace) -> tuple[list[float], str]:
    """Seconds at which requests arrive, and where they come from."""
    seconds, count = args.minutes * 60, int(args.minutes * args.requests_per_minute)
    if args.arrivals is None:
        drawn = np.random.default_rng(args.seed).uniform(0.0, seconds, count)
        return sorted(drawn.tolist()), "drawn uniformly"
    times_s = read_arrivals(args.arrivals).time_s_R[:count]
    return (times_s * seconds / max(times_s[-1], 1e-9)).tolist(), args.arrivals.name


async def soak(args: argparse.Namespace) -> dict:
    """All of it."""
    at_s, source = arrival_times(args)
    prompts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    log = args.log or Path(tempfile.mkstemp(prefix="moeless-soak-", suffix=".log")[1])
    options = ["--max-waiting", "4096", "--worker-timeout", str(args.worker_timeout)]
    server = Server(args.model, options + args.serve, log)
    print(f"serving on {server.url}, log in {log}", flush=True)
    memory: list[tuple[float, int]] = []
    try:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
        ) as client:
            model = (await client.models.list()).data[0].id
            references = {
                prompt: await ask_alone(client, model, prompt, args.max_tokens)
                for prompt in prompts.splitlines()[: args.prompts]
            }
            print(f"{len(references)} reference answers; in peace ...", flush=True)
            load = (client, model, references, at_s, args.max_tokens, args.seed)
            peace = await run_load(*load)
            print(f"... {peace.figures()}; with faults ...", flush=True)
            watcher = asyncio.create_task(watch_memory(server, memory))
            faults, storm = await asyncio.gather(
                do_faults(server, args.minutes, args.faults, args.seed), run_load(*load)
            )
            print(f"... {storm.figures()}", flush=True)
            await asyncio.sleep(SETTLE_S + args.worker_timeout)
            after = await run_load(client, model, references, [0.0] * 4, args.max_tokens, 1)
            await asyncio.sleep(4.0)
            watcher.cancel()
            stopped = [w.pid for w in server.workers() if w.status() == psutil.STATUS_STOPPED]
    finally:
        stop_s = server.stop()
    before_bytes = float(np.median([held for _, held in memory[:5]]))
    after_bytes = float(np.median([held for _, held in memory[-3:]]))
    calm, rough = peace.figures(), storm.figures()
    return {
        "provenance": provenance("measured")[2:],
        "machine": {"cores": os.cpu_count()},
        "arrivals": source,
        "minutes": args.minutes,
        "faults": dict(Counter(f["kind"] for f in faults if f["victim"] is not None)),
        "fault_list": faults,
        "peace": calm,
        "with_faults": rough,
        "afterwards": after.figures(),
        "p99_ttft_ratio": _ratio(rough, calm, "ttft_s"),
        "p99_tpot_ratio": _ratio(rough, calm, "tpot_s"),
        "memory_before_bytes": int(before_bytes),
        "memory_after_bytes": int(after_bytes),
        "memory_change": round(after_bytes / before_bytes - 1.0, 4),
        "stopped_workers_left": stopped,
        "server_stopped_in_s": round(stop_s, 2),
    }


def _ratio(rough: dict, calm: dict, name: str) -> float | None:
    if not rough[name] or not calm[name]:
        return None
    return round(rough[name]["p99"] / calm[name]["p99"], 2)


def verdict(report: dict) -> list[str]:
    """What is wrong, if anything."""
    problems = [
        f"{name}: {report[name][kind]} {kind}: {report[name]['examples']}"
        for name in ("peace", "with_faults", "afterwards")
        for kind in ("failed", "wrong")
        if report[name][kind]
    ]
    if report["minutes"] >= MEMORY_FROM_MINUTES and report["memory_change"] > MEMORY_MAY_GROW:
        problems.append(f"memory grew by {report['memory_change']:.1%}")
    if report["stopped_workers_left"]:
        problems.append(f"workers {report['stopped_workers_left']} were left stopped")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each of the two runs")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--arrivals", type=Path, help="a trace of arrivals, scaled to this rate")
    parser.add_argument("--requests-per-minute", type=float, default=30.0)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--worker-timeout", type=float, default=5.0, help="as serve takes it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--log", type=Path, help="the server's log")
    parser.add_argument("serve", nargs="*", help="further options of moeless serve, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped, too
    try:
        report = asyncio.run(soak(args))
    except MoelessError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "fault_list"}, indent=2))
    problems = verdict(report)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
