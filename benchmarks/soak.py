"""Serve while workers are killed, hung, paused, throttled and drained; compare with peace.

A real server (`moeless serve`, float32, greedy) gets open-loop arrivals: first in peace, then with
a seeded series of faults. Every answer is held against the one that the same prompt got alone.
Memory is compared between two quiet moments after the same requests, once before and once after
the faults, and without what experts hold: how many replicas there are is a decision.

    python benchmarks/soak.py --minutes 20 --faults 40      arrivals of the Azure trace, where
                                                            MOELESS_DATA_DIR has it
    python benchmarks/soak.py --minutes 2 --faults 10       `make soak`

Exit code 1: a request failed, an answer was wrong, memory changed by more than 3%, a worker was
left stopped, or a process was left after the server's end.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Awaitable
from importlib import resources
from pathlib import Path

import psutil
from chaos.arrivals import arrival_times, find_trace
from chaos.faults import KINDS, do_faults
from chaos.memory import take_stock
from chaos.report import (
    compare,
    count_kinds,
    find_problems,
    memory_change,
    slowest_requests,
    to_table,
)
from chaos.server import Server
from chaos.stillness import Stillness
from chaos.traffic import Outcome, Traffic
from provenance import provenance

from moeless.errors import MoelessError

SETTLE_S = 15.0
"""A worker that was lost last has a successor by then, which has loaded what is planned."""
WARM_UP_ROUNDS = 2
FULL_BATCH = 32
"""Sequences that run at the same time (`--max-batch-size` by default). Memory is compared after a
full batch: an engine keeps what its largest one took, and with faults requests pile up."""
STOCKS = 4
"""Moments of which the one counts in which least is held: an allocator keeps up to 64 MB of what
was freed last, or gives it back, as it happens."""


async def soak(args: argparse.Namespace) -> dict:
    """All of it."""
    seconds, peace_s = args.minutes * 60, args.peace_minutes * 60
    count = int(args.minutes * args.requests_per_minute)
    trace = args.arrivals or find_trace()
    at_s, source = arrival_times(trace, seconds=seconds, count=count, seed=args.seed)
    prompts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    log = args.log or Path(tempfile.mkstemp(prefix="moeless-soak-", suffix=".log")[1])
    options = ["--devices", args.devices, "--max-waiting", "4096"]
    options += ["--worker-timeout", str(args.worker_timeout)]
    options += ["--spare-workers", str(args.spare_workers), *args.serve]
    server = Server(args.model, options, log)
    traffic = Traffic(server.url, timeout_s=args.request_timeout)
    say(f"serving on {server.url}, log in {log}")
    loads, still = [os.getloadavg()[0]], [Stillness(), Stillness()]
    try:
        await traffic.ask_alone(prompts.splitlines()[: args.prompts], args.max_tokens)
        say(f"{len(traffic.references)} reference answers; in peace ...")
        peace = await watched(traffic.run([t for t in at_s if t <= peace_s], args.seed), still[0])
        before = await settle(server, traffic)
        loads.append(os.getloadavg()[0])
        say("with faults ...")
        faults, storm = await asyncio.gather(
            do_faults(server, args.kinds, seconds=seconds, count=args.faults, seed=args.seed),
            watched(traffic.run(at_s, args.seed), still[1]),
        )
        loads.append(os.getloadavg()[0])
        await asyncio.sleep(args.worker_timeout)
        afterwards = await traffic.run_all_at_once(1)
        after = await settle(server, traffic)
        stopped = [w.pid for w in server.workers() if w.status() == psutil.STATUS_STOPPED]
    finally:
        await traffic.close()
        stop_s, left = server.stop()
    calm, rough = peace.figures(), storm.figures()
    return {
        "provenance": provenance("measured")[2:],
        "machine": {
            "cores": os.cpu_count(),
            "processor": processor(),
            "nice": os.nice(0),
            "load_average": [round(load, 2) for load in loads],
        },
        "seed": args.seed,
        "arrivals": source,
        "minutes": args.minutes,
        "peace_minutes": args.peace_minutes,
        "faults": count_kinds(faults),
        "faults_wanted": args.faults,
        "peace": calm,
        "with_faults": rough,
        "afterwards": afterwards.figures(),
        "p99_ttft_ratio": compare(calm, rough, "ttft_s"),
        "p99_tpot_ratio": compare(calm, rough, "tpot_s"),
        "stood_still_s": {
            "peace": round(still[0].seconds, 2),
            "with_faults": round(still[1].seconds, 2),
        },
        "memory_change": memory_change(before, after),
        "memory_before": before,
        "memory_after": after,
        "stopped_workers_left": stopped,
        "processes_left": left,
        "server_stopped_in_s": round(stop_s, 2),
        "slowest": slowest_requests(storm, faults),
        "fault_list": [fault.to_json() for fault in faults],
    }


async def watched(run: Awaitable[Outcome], still: Stillness) -> Outcome:
    """Traffic, and beside it a look at whether we run at all."""
    watcher = asyncio.create_task(still.watch())
    try:
        return await run
    finally:
        watcher.cancel()


async def settle(server: Server, traffic: Traffic) -> dict:
    """Bring the server into a state that can be compared, and see what it holds."""
    await asyncio.sleep(SETTLE_S)
    await traffic.run_all_at_once(WARM_UP_ROUNDS, copies=-(-FULL_BATCH // len(traffic.references)))
    stocks = []
    for _ in range(STOCKS):
        await traffic.run_all_at_once(1)
        await asyncio.sleep(1.0)
        stocks.append(await asyncio.to_thread(take_stock, server))
    return min(stocks, key=lambda stock: stock["other_bytes"])


def processor() -> str:
    """Its name, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def say(text: str) -> None:
    """Tell how far we are."""
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--devices", default="cpu:2", help="as serve takes it")
    parser.add_argument("--minutes", type=float, default=20.0, help="with faults")
    parser.add_argument("--peace-minutes", type=float, help="before; the same by default")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--arrivals", type=Path, help="a trace of arrivals, scaled to this rate")
    parser.add_argument("--requests-per-minute", type=float, default=30.0)
    parser.add_argument("--request-timeout", type=float, default=300.0, help="then it has failed")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--worker-timeout", type=float, default=10.0, help="as serve takes it")
    parser.add_argument("--spare-workers", type=int, default=1, help="as serve takes it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--table", type=Path, help="write the table here")
    parser.add_argument("--log", type=Path, help="the server's log")
    parser.add_argument("serve", nargs="*", help="further options of moeless serve, after --")
    args = parser.parse_args()
    args.peace_minutes = args.minutes if args.peace_minutes is None else args.peace_minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped, too
    try:
        report = asyncio.run(soak(args))
    except MoelessError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    table = to_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.table:
        args.table.write_text(table + "\n")
    print(table)
    return 1 if find_problems(report) else 0


if __name__ == "__main__":
    sys.exit(main())
