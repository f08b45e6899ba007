"""Add and drain devices again and again while requests arrive, and see that nothing is left.

A real server (`moeless serve`, float32, greedy) gets the same prompts all the time. In each cycle
a device is added with `moeless devices add`'s own client, serves for a moment, and another one is
drained; every fifth cycle budgets shrink and grow, too. Every answer is held against the one that
the same prompt got alone. Processes, descriptors, shared memory and memory are counted in quiet
moments: before, in the middle and after.

    python benchmarks/join_leave.py --cycles 50 --json join_leave.json

Exit code 1: a request failed, an answer was wrong, a device did not join or leave, or something
grew.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import psutil
from chaos.memory import take_stock
from chaos.server import Server
from chaos.traffic import Outcome, Traffic
from provenance import provenance

from moeless.errors import MoelessError
from moeless.functions.supervisor.admin_client import AdminClient
from moeless.functions.supervisor.pool_directory import PoolDirectory

DEADLINE_S = 240.0
"""Others may use the machine, too."""
QUIET_S = 3.0
MEMORY_MAY_GROW = 0.05


@dataclass(kw_only=True)
class Timings:
    """How long things took, seconds."""

    add: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    budget: list[float] = field(default_factory=list)

    def figures(self) -> dict:
        """For the report."""
        return {
            name: {
                "times": len(values),
                "p50": round(statistics.median(values), 3),
                "max": round(max(values), 3),
            }
            for name, values in vars(self).items()
            if values
        }


def count_descriptors(server: Server) -> dict[str, int]:
    """Open descriptors by role; of workers, the most that one has."""
    found: dict[str, int] = {}
    roles = server.roles()
    for pid, role in roles.items():
        with contextlib.suppress(psutil.Error):
            found[role] = max(found.get(role, 0), psutil.Process(pid).num_fds())
    return found | {"processes": len(roles)}


def count_regions(server: Server) -> int:
    """Anonymous shared regions (memfd) that the supervisor has open."""
    supervisor = next(pid for pid, role in server.roles().items() if role == "supervisor")
    links = (str(fd.readlink()) for fd in Path(f"/proc/{supervisor}/fd").iterdir())
    return sum("memfd:" in link for link in links)


async def settle(server: Server, traffic: Traffic) -> dict:
    """Bring the server into a state that can be compared, and see what it holds."""
    await traffic.run_all_at_once(2)
    await asyncio.sleep(QUIET_S)
    stock = await asyncio.to_thread(take_stock, server, samples=3)
    return {
        "descriptors": count_descriptors(server),
        "regions": count_regions(server),
        "memory": stock,
    }


class Operator:
    """Adds and drains devices."""

    def __init__(self, admin: AdminClient) -> None:
        self.admin = admin
        self.timings = Timings()

    async def await_state(self, device: int, states: set[str]) -> dict:
        """Look until a device is in one of some states."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = self.admin.list_devices()[device]
            if found["state"] in states:
                return found
            if time.monotonic() > deadline_s:
                raise SystemExit(f"device {device} is {found['state']}, expected {states}")
            await asyncio.sleep(0.05)

    async def add(self) -> int:
        """Start a device and wait until it is up."""
        began_s = time.monotonic()
        device = self.admin.add("cpu")
        found = await self.await_state(device, {"up", "down"})
        if found["state"] != "up":
            raise SystemExit(f"device {device} {found['note']}")
        self.timings.add.append(time.monotonic() - began_s)
        return device

    async def drain(self, device: int) -> None:
        """Drain a device and wait until it has left."""
        began_s = time.monotonic()
        self.admin.drain(device)
        await self.await_state(device, {"drained"})
        self.timings.drain.append(time.monotonic() - began_s)

    async def squeeze(self, device: int) -> None:
        """Halve a budget, wait until it is kept to, and give it back."""
        before = self.admin.list_devices()[device]["budget_bytes"]
        began_s = time.monotonic()
        self.admin.set_budget(device, before // 2)
        while self.admin.list_devices()[device]["held_bytes"] > before // 2:
            if time.monotonic() > began_s + DEADLINE_S:
                raise SystemExit(f"device {device} does not keep to its budget")
            await asyncio.sleep(0.05)
        self.timings.budget.append(time.monotonic() - began_s)
        await asyncio.sleep(1.0)
        self.admin.set_budget(device, before)


def add_up(total: Outcome, more: Outcome) -> None:
    """Take one run's requests into the sum of all."""
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)


@contextlib.asynccontextmanager
async def busy(traffic: Traffic, outcome: Outcome) -> AsyncIterator[None]:
    """All prompts at once, again and again, until the block has ended."""
    running = True

    async def go_on() -> None:
        while running:
            add_up(outcome, await traffic.run_all_at_once(1))

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        running = False
        await task


async def run_cycles(args: argparse.Namespace, server: Server, pool: Path) -> dict:
    """All of it."""
    traffic, outcome = Traffic(server.url, timeout_s=600.0), Outcome()
    prompts = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
    stocks = []
    with AdminClient(pool) as admin:
        operator = Operator(admin)
        try:
            await traffic.ask_alone(prompts.splitlines()[: args.prompts], args.max_tokens)
            # The first of everything leaves caches behind that are no leak.
            async with busy(traffic, outcome):
                await operator.drain(await operator.add())
            stocks.append(await settle(server, traffic))
            for half in (range(args.cycles // 2), range(args.cycles // 2, args.cycles)):
                async with busy(traffic, outcome):
                    for cycle in half:
                        await one_cycle(operator, cycle, dwell_s=args.dwell)
                        done = outcome.same + outcome.close_calls
                        bad = len(outcome.failures) + len(outcome.wrong)
                        print(f"cycle {cycle + 1}: {done} answers, {bad} bad", flush=True)
                stocks.append(await settle(server, traffic))
        finally:
            await traffic.close()
    return {
        "provenance": provenance("measured")[2:],
        "cycles": args.cycles,
        "requests": outcome.figures(),
        "seconds": operator.timings.figures(),
        "before": stocks[0],
        "middle": stocks[1],
        "after": stocks[2],
    }


async def one_cycle(operator: Operator, cycle: int, *, dwell_s: float) -> None:
    """A device joins, another leaves; the place that is drained goes round."""
    added = await operator.add()
    await asyncio.sleep(dwell_s)
    up = [d["device"] for d in operator.admin.list_devices() if d["state"] == "up"]
    if cycle % 5 == 4:
        await operator.squeeze(up[cycle % len(up)])
    await operator.drain(up[cycle % len(up)] if cycle % 3 else added)
    await asyncio.sleep(dwell_s)


def find_problems(report: dict) -> list[str]:
    """Why the run counts as failed."""
    problems = []
    if report["requests"]["failed"] or report["requests"]["wrong"]:
        problems.append("requests failed, or answers were wrong")
    before, after = report["before"], report["after"]
    for role, count in before["descriptors"].items():
        if after["descriptors"].get(role, 0) > count:
            problems.append(f"{role}: {count} became {after['descriptors'].get(role)}")
    if after["regions"] > before["regions"]:
        problems.append(f"{before['regions']} shared regions became {after['regions']}")
    if report["processes_left"]:
        problems.append(f"{report['processes_left']} processes were left at the end")
    growth = after["memory"]["other_bytes"] / before["memory"]["other_bytes"] - 1
    report["memory_growth"] = round(growth, 4)
    if growth > MEMORY_MAY_GROW:
        problems.append(f"memory without experts grew by {growth:.1%}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--dwell", type=float, default=1.0, help="seconds between changes")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--log", type=Path, help="the server's log")
    parser.add_argument("serve", nargs="*", help="further options of moeless serve, after --")
    args = parser.parse_args()
    log = args.log or Path(tempfile.mkstemp(prefix="moeless-join-leave-", suffix=".log")[1])
    server = Server(args.model, ["--devices", "cpu:2", *args.serve], log)
    print(f"serving on {server.url}, log in {log}", flush=True)
    try:
        report = asyncio.run(run_cycles(args, server, PoolDirectory(server.pool).admin_socket))
    except MoelessError as error:
        print(f"join_leave: {error}", file=sys.stderr)
        return 2
    finally:
        _, left = server.stop()
    report["processes_left"] = left
    problems = find_problems(report)
    text = json.dumps(report, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
