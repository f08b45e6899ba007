"""``moeless devices``: the devices of a running pool, and what becomes of them."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click

from moeless.core.cluster import parse_bytes
from moeless.errors import FunctionError
from moeless.functions.supervisor.admin_client import AdminClient
from moeless.functions.supervisor.pool_search import find_pool

_LOOK_EVERY_S = 0.1
_Command = Callable[..., Any]


@click.group()
def devices() -> None:
    """Show the devices of a running pool, add some, drain some, change what they may hold.

    A pool is what moeless serve --invoker process starts beside its engine, or moeless pool serve.
    Requests go on meanwhile, and answers stay the same. Only the user who runs the pool can reach
    it.

    \b
    Examples:
      moeless devices list
      moeless devices add cpu --budget 512MiB
      moeless devices drain 1
      moeless devices budget 0 2GiB --pool /run/user/1000/moeless-k3v9x2
    """


def _pool_option(command: _Command) -> _Command:
    return click.option(
        "--pool",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Directory of the pool; default: the only one of yours that runs.",
    )(command)


def _wait_option(command: _Command) -> _Command:
    return click.option(
        "--no-wait", is_flag=True, help="Return as soon as it has begun; list shows the rest."
    )(command)


def _connect(pool: Path | None) -> AdminClient:
    return AdminClient(find_pool(pool).admin_socket)


@devices.command(name="list")
@_pool_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, free slots included.")
def list_devices(pool: Path | None, as_json: bool) -> None:
    """Show devices: their state, their worker, what they may hold and what they hold.

    \b
    States:
      starting   a worker starts, for the first time or again
      up         it serves
      draining   it gets no new work; what it holds is loaded elsewhere, then it ends
      drained    it has ended as it was asked to; its slot is free
      down       nobody is there; its slot is free

    \b
    Examples:
      moeless devices list
      moeless devices list --json | jq '.[] | select(.state == "up").label'
    """
    with _connect(pool) as admin:
        found = admin.list_devices()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    shown = [each for each in found if each["state"] != "down" or each["note"]]
    rows = [
        (
            str(each["device"]),
            each["label"],
            each["state"],
            str(each["pid"] or "–"),
            show_bytes(each["budget_bytes"]),
            show_bytes(each["held_bytes"]),
            f"{each['instances']:,}",
            str(each["restarts"]),
        )
        for each in shown
    ]
    names = ("device", "kind", "state", "pid", "budget", "held", "instances", "restarts")
    show_table(names, rows, left={"kind", "state"})
    for each in shown:
        slow = f"slow: 1/{1 / each['speed']:.0f} of the others" if each["speed"] < 1 else ""
        if note := each["note"] or slow:
            click.echo(f"device {each['device']}: {note}")
    free = sum(each["state"] in ("down", "drained") for each in found)
    click.echo(f"{free} more can join")


@devices.command()
@click.argument("kind", metavar="DEVICE")
@_pool_option
@click.option("--budget", metavar="SIZE", help="What it may hold; default: as others of the pool.")
@click.option(
    "--core",
    "cores",
    type=click.IntRange(min=0),
    multiple=True,
    help="A core to stay on, several times for several; default: the least used.",
)
@_wait_option
def add(
    kind: str, pool: Path | None, budget: str | None, cores: tuple[int, ...], no_wait: bool
) -> None:
    """Start one more device, cpu or cuda:N, and wait until it serves.

    \b
    Examples:
      moeless devices add cpu
      moeless devices add cpu --budget 512MiB --core 3
    """
    budget_bytes = None if budget is None else parse_bytes(budget, option="--budget")
    with _connect(pool) as admin:
        device = admin.add(kind, budget_bytes=budget_bytes, cores=cores)
        if no_wait:
            click.echo(f"device {device} is starting")
            return
        found = _wait(admin, device, {"up", "down", "drained"})
    if found["state"] == "up":
        click.echo(f"device {device} ({found['label']}) is up")
    elif found["state"] == "down":
        raise FunctionError(f"device {device} {found['note']}")
    else:
        raise FunctionError(f"device {device} was drained before it was up")


@devices.command()
@click.argument("device", type=click.IntRange(min=0))
@_pool_option
@click.option("--cancel", is_flag=True, help="Take it back while it is being drained.")
@_wait_option
def drain(device: int, pool: Path | None, cancel: bool, no_wait: bool) -> None:
    """Take DEVICE out of use, and wait until its worker has ended.

    It gets no new tokens. What only it holds is loaded on other devices first; what runs there
    ends. It is refused if the other devices could not hold one layer's experts at once. With
    --cancel a device that is being drained is used again.

    \b
    Examples:
      moeless devices drain 1
      moeless devices drain 1 --no-wait
      moeless devices drain 1 --cancel
    """
    with _connect(pool) as admin:
        if cancel:
            admin.keep(device)
            click.echo(f"device {device} is used again")
            return
        admin.drain(device)
        if no_wait:
            click.echo(f"device {device} is draining")
            return
        found = _wait(admin, device, {"drained", "down", "up"}, progress=True)
    if found["state"] == "up":
        raise FunctionError(f"device {device} is used again: draining it was taken back")
    click.echo(f"device {device} is drained")


@devices.command()
@click.argument("device", type=click.IntRange(min=0))
@click.argument("size")
@_pool_option
@_wait_option
def budget(device: int, size: str, pool: Path | None, no_wait: bool) -> None:
    """Let DEVICE hold SIZE bytes of experts from now on.

    More takes effect at once. With less, what is missed least leaves, last copies once they are
    loaded elsewhere. It is refused if devices could then not hold one layer's experts at once.

    \b
    Examples:
      moeless devices budget 0 512MiB
      moeless devices budget 1 2GB --no-wait
    """
    num_bytes = parse_bytes(size, option="SIZE")
    with _connect(pool) as admin:
        admin.set_budget(device, num_bytes)
        found = admin.list_devices()[device]
        while not no_wait and found["state"] == "up" and found["held_bytes"] > num_bytes:
            time.sleep(_LOOK_EVERY_S)
            found = admin.list_devices()[device]
            if found["budget_bytes"] != num_bytes:
                break  # somebody has changed it again
    held, most = show_bytes(found["held_bytes"]), show_bytes(found["budget_bytes"])
    click.echo(f"device {device} holds {held} of {most}")


def _wait(
    admin: AdminClient, device: int, ends: set[str], *, progress: bool = False
) -> dict[str, Any]:
    """Look at a device until it is in one of some states; returns what was seen last."""
    told = ""
    while True:
        found = admin.list_devices()[device]
        if found["state"] in ends:
            return found
        line = f"device {device}: {found['instances']} instances left"
        if progress and line != told:
            click.echo(line, err=True)
            told = line
        time.sleep(_LOOK_EVERY_S)


def show_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str]
) -> None:
    """Print columns with their names, as wide as their values: nothing is cut, piped or not.

    Args:
        names: Of the columns.
        rows: Their values.
        left: Columns that begin at the left; numbers end at the right.
    """
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        cells = (
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(names, row, widths, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def show_bytes(count: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
