"""Time to the first token when all experts are gone, against what the storage allows.

Experts leave after a short keep-alive, the checkpoint's pages are dropped from the page cache
(checked with mincore), and a request comes. Three ways to answer it take turns within one run:

- ``pipelined``: layers behind the first are loaded in their order while earlier ones compute;
- ``unpipelined``: a layer is loaded when a forecast or its own tokens ask for it;
- ``whole model first``: everything is loaded, then the request begins.

The limit is max(bytes of all experts / read bandwidth, time to the first token when warm) + the
load of one layer. The bandwidth is measured in the same turns: the same files, dropped as well,
read from front to back by one reader and by two; the better one counts.

    python benchmarks/cold_start.py --out DIR [--rounds 7] [--models random demo-bf16 demo-f32]

``random`` is a Mixtral-like model of 1.4 GB of experts in bfloat16, written to a temporary folder
and deleted afterwards. What lies below the page cache (a hypervisor, the drive) may keep bytes
as well; ``first_read_gb_s`` says how fast the very first pass was. Some virtual machines give
memory back to their host as soon as it is free, and getting it again costs more than the disk:
so every turn begins with taking and freeing as much as it will need (``--no-touch`` leaves it
out). As root, ``--nice -15`` outranks what else runs on the machine.
"""

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads sleep
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from provenance import provenance
from transformers import AutoModelForCausalLM, MixtralConfig

from moeless.bootstrap.serving.engine import find_model
from moeless.bootstrap.serving.experts import ExpertsRuntime, start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.engines.transformers.generation import EngineOptions, TransformersTextEngine
from moeless.engines.transformers.loader import load_engine_model

ARMS = ("pipelined", "unpipelined", "whole model first")
MODELS = {"random": "auto", "demo-bf16": "auto", "demo-f32": "float32"}
GOAL = 1.3
KEEP_ALIVE_S, PATIENCE_S = 1.0, 60.0
PROMPT, TOKENS = 32, 4
READ_BYTES = 8 << 20


class NumberTokenizer:
    """Stands in for a tokenizer: a token is shown as one letter."""

    eos_token_id = None

    def decode(self, token_ids, **_):
        """Letters for ids."""
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to answer, with an engine and workers of its own."""

    name: str
    runtime: ExpertsRuntime
    engine: TransformersTextEngine

    def resident_bytes(self) -> int:
        """Bytes of experts on devices."""
        return sum(self.runtime.client.report()["resident_bytes_D"])

    def read_bytes(self) -> int:
        """Bytes that its workers have had the disk read."""
        pids = self.runtime.client.report()["worker_pids"]
        return sum(_counter(f"/proc/{pid}/io", "read_bytes") for pid in pids)

    def wait_until_cold(self) -> float:
        """Seconds until the keep-alive has emptied all devices."""
        began = time.perf_counter()
        while self.resident_bytes():
            assert time.perf_counter() - began < PATIENCE_S, "experts outlive their keep-alive"
            time.sleep(0.05)
        return time.perf_counter() - began

    def load_all(self) -> None:
        """Load every expert of every layer."""
        spec, client = self.runtime.spec, self.runtime.client
        for layer in range(spec.num_layers):
            ticket = client.demand(layer=layer, experts=list(range(spec.num_experts)))
            client.await_demand(ticket, timeout_s=PATIENCE_S)

    def ask(self, prompt: tuple[int, ...], number: int) -> tuple[float, list[int]]:
        """Seconds to the first token, and all tokens."""
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        began, first, tokens = time.perf_counter(), None, []
        if self.name == "whole model first" and not self.resident_bytes():
            self.load_all()
        request = GenerationRequest(request_id=f"{number}", prompt_ids=prompt, sampling=sampling)
        for event in self.engine.submit(request):
            assert not event.error, event.error
            if event.token_ids and first is None:
                first = time.perf_counter() - began
            tokens += event.token_ids
        assert first is not None
        return first, tokens


@dataclass(kw_only=True)
class Found:
    """What was measured of one model; times in seconds, one per round."""

    warm_s: list[float] = field(default_factory=list)
    cold_s: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    disk_share: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    bytes_s: dict[int, list[float]] = field(default_factory=lambda: {1: [], 2: []})
    first_bytes_s: float = 0.0
    gone_after_s: list[float] = field(default_factory=list)
    expert_bytes: int = 0
    layers: int = 0

    def summary(self) -> dict[str, object]:
        """Medians with ranges, and the limit."""
        bandwidth = max(statistics.median(rates) for rates in self.bytes_s.values())
        warm_s = statistics.median(self.warm_s)
        read_s = self.expert_bytes / bandwidth
        limit_s = max(read_s, warm_s) + read_s / self.layers
        cold = {
            arm: {
                **_spread(times),
                "ratio_to_limit": statistics.median(times) / limit_s,
                "bytes_from_disk_share": statistics.median(self.disk_share[arm]),
            }
            for arm, times in self.cold_s.items()
        }
        return {
            "expert_bytes": self.expert_bytes,
            "layers": self.layers,
            "bandwidth_gb_s": {
                f"{readers} readers": {k: v / 1e12 for k, v in _spread(rates).items()}
                for readers, rates in self.bytes_s.items()
            },
            "first_read_gb_s": self.first_bytes_s / 1e9,
            "warm_ttft": _spread(self.warm_s),
            "limit_ms": limit_s * 1e3,
            "read_ms": read_s * 1e3,
            "cold_ttft": cold,
            "all_gone_after_s": _spread([each / 1e3 for each in self.gone_after_s]),
            "goal": GOAL,
            "met": cold["pipelined"]["ratio_to_limit"] <= GOAL,
        }


def _spread(seconds: list[float]) -> dict[str, float]:
    scaled = [each * 1e3 for each in seconds]
    return {"median": statistics.median(scaled), "min": min(scaled), "max": max(scaled)}


def _counter(path: str, name: str) -> int:
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# The page cache


def drop_pages(directory: Path) -> None:
    """Have the system forget the checkpoint's pages, and check that it did."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached_share(path)
        assert left < 0.01, f"{left:.0%} of {path.name} is still in the page cache"


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(mapped)), found
        )
        assert not failed, "mincore failed"
        del view
        return sum(flag & 1 for flag in found) / pages


def touch_memory(num_bytes: int) -> None:
    """Take memory and free it, so that the host of a virtual machine provides it."""
    with mmap.mmap(-1, num_bytes) as region:
        block = torch.frombuffer(region, dtype=torch.uint8)
        block[:: mmap.PAGESIZE] = 1
        del block


def read_files(directory: Path, readers: int) -> float:
    """Bytes a second of reading the checkpoint from front to back."""
    paths = sorted(directory.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in paths)
    buffers = [memoryview(bytearray(READ_BYTES)) for _ in range(readers)]
    for buffer in buffers:
        buffer[:] = b"\1" * READ_BYTES  # its pages are not what is measured

    def read(number: int) -> None:
        for path in paths:
            size = path.stat().st_size
            begin, end = size * number // readers, size * (number + 1) // readers
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                while begin < end:
                    count = file.readinto(buffers[number][: end - begin])
                    assert count, "the file ended"
                    begin += count

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    before, began = _counter("/proc/self/io", "read_bytes"), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    come = _counter("/proc/self/io", "read_bytes") - before
    assert come >= 0.99 * total, f"only {come / total:.0%} of the bytes came from the disk"
    return total / seconds


# Models and engines


def save_random(directory: Path) -> None:
    """Write a checkpoint with 1.4 GB of experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=0,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


@contextmanager
def started(directory: Path, dtype: str, name: str, options: argparse.Namespace):
    """An arm."""
    loaded = load_engine_model(directory, dtype=dtype)
    runtime = start_experts(
        loaded,
        ExpertsConfig(
            devices=parse_devices("cpu:2"),
            worker_threads=1,
            keep_alive_s=KEEP_ALIVE_S,
            policy=PolicyConfig(wake_ahead=name == "pipelined"),
        ),
    )
    try:
        assert runtime.supervisor is not None
        pids = [runtime.supervisor.process.pid, *runtime.client.report()["worker_pids"]]
        outrank([os.getpid(), *pids], options.nice)
        with TransformersTextEngine(
            loaded.model, NumberTokenizer(), model_id="bench", options=EngineOptions()
        ) as engine:
            yield Arm(name=name, runtime=runtime, engine=engine)
    finally:
        runtime.close()


def outrank(pids: list[int], nice: int) -> None:
    """Set the priority of processes, and of the groups that Linux puts sessions into."""
    if not nice:
        return
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text(str(nice), encoding="ascii")


def measure(directory: Path, dtype: str, options: argparse.Namespace) -> Found:
    """All rounds of one model."""
    found = Found()
    files = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    drop_pages(directory)
    found.first_bytes_s = read_files(directory, 1)
    with (
        started(directory, dtype, ARMS[0], options) as a,
        started(directory, dtype, ARMS[1], options) as b,
        started(directory, dtype, ARMS[2], options) as c,
    ):
        arms = [a, b, c]
        spec = a.runtime.spec
        found.layers = spec.num_layers
        found.expert_bytes = spec.num_functions * spec.expert.num_parameters * 2  # as stored
        vocabulary = a.engine.model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(1)
        prompt = tuple(torch.randint(1, vocabulary, (PROMPT,), generator=generator).tolist())
        numbers = iter(range(10**9))
        expected = [arm.ask(prompt, next(numbers))[1] for arm in arms]
        assert expected[0] == expected[1] == expected[2]

        def prepare() -> None:
            if not options.no_touch:
                touch_memory(3 * files)
            drop_pages(directory)

        def cold(arm: Arm, *, keep: bool) -> None:
            gone_s = arm.wait_until_cold()
            prepare()
            before = arm.read_bytes()
            seconds, tokens = arm.ask(prompt, next(numbers))
            read = arm.read_bytes() - before
            assert tokens == expected[0], f"{arm.name}: other tokens than when warm"
            assert arm.resident_bytes() > 0
            if keep:
                found.gone_after_s.append(gone_s)
                found.cold_s[arm.name].append(seconds)
                found.disk_share[arm.name].append(read / found.expert_bytes)
                again = [arm.ask(prompt, next(numbers)) for _ in range(3)]
                assert all(tokens == expected[0] for _, tokens in again)
                found.warm_s.append(statistics.median(seconds for seconds, _ in again))

        def bandwidth(readers: int) -> None:
            prepare()
            found.bytes_s[readers].append(read_files(directory, readers))

        turns: list[Callable[[bool], None]] = [
            *(lambda keep, arm=arm: cold(arm, keep=keep) for arm in arms),
            lambda keep: bandwidth(1) if keep else None,
            lambda keep: bandwidth(2) if keep else None,
        ]
        for number in range(-1, options.rounds):  # the first is a warm-up
            shift = number % len(turns)
            for turn in turns[shift:] + turns[:shift]:
                turn(number >= 0)
    return found


def table(results: dict[str, dict]) -> str:
    """Markdown."""
    lines = [
        "| model | experts | read bandwidth | warm TTFT | limit | pipelined | unpipelined | "
        "whole model first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        rate = max(rates["median"] for rates in each["bandwidth_gb_s"].values())
        cells = [
            f"{cold['median']:.0f} ms ({cold['min']:.0f}–{cold['max']:.0f}), "
            f"{cold['ratio_to_limit']:.2f} ×"
            for cold in each["cold_ttft"].values()
        ]
        warm = each["warm_ttft"]
        lines.append(
            f"| {name} | {each['expert_bytes'] / 1e9:.2f} GB | {rate:.2f} GB/s | "
            f"{warm['median']:.0f} ms ({warm['min']:.0f}–{warm['max']:.0f}) | "
            f"{each['limit_ms']:.0f} ms | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def write(results: dict[str, dict], options: argparse.Namespace) -> None:
    """Keep what is known so far."""
    options.out.mkdir(parents=True, exist_ok=True)
    about = provenance("measured").removeprefix("# ")
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    text = {"provenance": about, "machine": machine, "touched": not options.no_touch}
    stem = "cold_start_untouched" if options.no_touch else "cold_start"
    (options.out / f"{stem}.json").write_text(
        json.dumps(text | {"models": results}, indent=1) + "\n", encoding="utf-8"
    )
    (options.out / f"{stem}.md").write_text(
        f"<!-- {about} -->\n\n{table(results)}\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-touch", action="store_true")
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="moeless-cold-") as folder:
            directory = Path(folder)
            if name == "random":
                save_random(directory)
            else:  # a copy: somebody else may be reading the model itself
                shutil.copytree(find_model("demo"), directory, dirs_exist_ok=True)
            results[name] = measure(directory, MODELS[name], options).summary()
            print(table({name: results[name]}), flush=True)
            write(results, options)


if __name__ == "__main__":
    main()
