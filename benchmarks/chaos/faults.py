"""What is done to workers, at times and to victims that a seed decides."""

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
        lasted_s: How long it was done; 0 for what cannot be undone.
        victim: Process id, or None if no worker was there.
    """

    kind: str
    at_s: float
    lasted_s: float
    victim: int | None

    def to_json(self) -> dict:
        """For the report."""
        return asdict(self)


async def kill(victim: psutil.Process, _chance: random.Random) -> None:
    """It is gone at once."""
    victim.kill()


async def hang(victim: psutil.Process, _chance: random.Random) -> None:
    """It never moves again; somebody has to notice."""
    victim.suspend()


async def pause(victim: psutil.Process, chance: random.Random) -> None:
    """It stands still, and goes on by itself: before or after it was given up."""
    victim.suspend()
    await asyncio.sleep(chance.uniform(0.2, 2.0))
    victim.resume()


async def throttle(victim: psutil.Process, chance: random.Random) -> None:
    """It gets a quarter of its time for some seconds."""
    until_s = time.monotonic() + chance.uniform(3.0, 8.0)
    try:
        while time.monotonic() < until_s:
            victim.suspend()
            await asyncio.sleep(0.06)
            victim.resume()
            await asyncio.sleep(0.02)
    finally:
        with contextlib.suppress(psutil.Error):
            victim.resume()


KINDS: dict[str, Callable[[psutil.Process, random.Random], Awaitable[None]]] = {
    "kill": kill,
    "hang": hang,
    "pause": pause,
    "throttle": throttle,
}


async def do_faults(
    server: Server, kinds: list[str], *, seconds: float, count: int, seed: int
) -> list[Fault]:
    """Do something to a worker every now and then; each kind as often as any other."""
    chance = random.Random(seed)
    order = [kinds[i % len(kinds)] for i in range(count)]
    chance.shuffle(order)
    done: list[Fault] = []
    began_s = time.monotonic()
    for number, kind in enumerate(order):
        due_s = (number + chance.random()) * seconds / count
        await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
        victim = await _choose_victim(server, chance)
        at_s = time.monotonic() - began_s
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                await KINDS[kind](victim, chance)
        done.append(
            Fault(
                kind=kind,
                at_s=round(at_s, 2),
                lasted_s=round(time.monotonic() - began_s - at_s, 2),
                victim=None if victim is None else victim.pid,
            )
        )
    return done


async def _choose_victim(server: Server, chance: random.Random) -> psutil.Process | None:
    """One of the workers; where all have just been lost, a moment later."""
    for _ in range(20):
        workers = sorted(server.workers(), key=lambda w: w.pid)
        if workers:
            return chance.choice(workers)
        await asyncio.sleep(0.25)
    return None
