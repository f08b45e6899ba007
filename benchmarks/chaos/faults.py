"""What is done to workers and devices, at times and to victims that a seed decides."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import psutil

from chaos.server import Server


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that was done.

    Args:
        kind: What.
        at_s: When, since the begin of the run.
        lasted_s: How long it was done; about 0 for what cannot be undone.
        victim: Process id of the worker, or None if it could not be done.
    """

    kind: str
    at_s: float
    lasted_s: float
    victim: int | None

    def to_json(self) -> dict:
        """For the report."""
        return asdict(self)


async def kill(server: Server, chance: random.Random) -> int | None:
    """A worker is gone at once."""
    victim = await _choose_worker(server, chance)
    victim.kill()
    return victim.pid


async def hang(server: Server, chance: random.Random) -> int | None:
    """A worker never moves again; somebody has to notice."""
    victim = await _choose_worker(server, chance)
    victim.suspend()
    return victim.pid


async def pause(server: Server, chance: random.Random) -> int | None:
    """A worker stands still, and goes on by itself: before or after it was given up."""
    victim = await _choose_worker(server, chance)
    victim.suspend()
    await asyncio.sleep(chance.uniform(0.2, 2.0))
    with contextlib.suppress(psutil.Error):
        victim.resume()
    return victim.pid


async def throttle(server: Server, chance: random.Random) -> int | None:
    """A worker gets a quarter of its time for some seconds."""
    victim = await _choose_worker(server, chance)
    until_s = time.monotonic() + chance.uniform(3.0, 8.0)
    with contextlib.suppress(psutil.Error):
        try:
            while time.monotonic() < until_s:
                victim.suspend()
                await asyncio.sleep(0.06)
                victim.resume()
                await asyncio.sleep(0.02)
        finally:
            victim.resume()
    return victim.pid


async def drain(server: Server, chance: random.Random) -> int | None:
    """An operator takes a device out of use, and another one joins a moment later."""
    for _ in range(60):
        devices = await server.list_devices()
        if all(d["state"] in ("up", "drained", "down") for d in devices):
            break
        await asyncio.sleep(0.5)
    up = [d for d in devices if d["state"] == "up"]
    if len(up) < 2:
        return None
    device = chance.choice(up)
    if await server.run("devices", "drain", str(device["device"])) is None:
        return None
    await asyncio.sleep(chance.uniform(1.0, 4.0))
    added = await server.run("devices", "add", "cpu")
    return device["pid"] if added is not None else None


KINDS: dict[str, Callable[[Server, random.Random], Awaitable[int | None]]] = {
    "drain": drain,
    "hang": hang,
    "kill": kill,
    "pause": pause,
    "throttle": throttle,
}


async def do_faults(
    server: Server, kinds: list[str], *, seconds: float, count: int, seed: int
) -> list[Fault]:
    """Do something every now and then; each kind as often as any other."""
    chance = random.Random(seed)
    order = [kinds[i % len(kinds)] for i in range(count)]
    chance.shuffle(order)
    done: list[Fault] = []
    began_s = time.monotonic()
    for number, kind in enumerate(order):
        due_s = (number + chance.random()) * seconds / count
        await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
        at_s = time.monotonic() - began_s
        victim = None
        with contextlib.suppress(psutil.Error):
            victim = await KINDS[kind](server, chance)
        lasted_s = time.monotonic() - began_s - at_s
        done.append(
            Fault(kind=kind, at_s=round(at_s, 2), lasted_s=round(lasted_s, 2), victim=victim)
        )
    return done


async def _choose_worker(server: Server, chance: random.Random) -> psutil.Process:
    """One of the workers; where all have just been lost, a moment later."""
    for _ in range(40):
        workers = sorted(server.workers(), key=lambda w: w.pid)
        if workers:
            return chance.choice(workers)
        await asyncio.sleep(0.25)
    raise psutil.NoSuchProcess(server.process.pid, msg="no worker has come back")
