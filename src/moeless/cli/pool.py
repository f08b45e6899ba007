"""``moeless pool``: workers that several engines and models share."""

import json
import signal
from pathlib import Path
from typing import Any

import click

from moeless.cli.devices import show_bytes, show_table
from moeless.cli.finite_range import FiniteRange
from moeless.cli.options import with_headroom, worker_fields, worker_options
from moeless.config import ExpertsConfig
from moeless.core.cluster import parse_bytes, parse_devices
from moeless.core.signals import TERMINATED
from moeless.functions.supervisor.admin_client import AdminClient
from moeless.functions.supervisor.pool_search import find_pool
from moeless.telemetry.log_format import configure_logging


@click.group()
def pool() -> None:
    """Run a pool of devices that several engines and models share, and show its models.

    moeless devices shows and changes its devices.

    \b
    Examples:
      moeless pool serve --pool /tmp/moe --devices cuda:0,1 --device-memory 60GB
      moeless serve ./Mixtral-8x7B-Instruct --pool /tmp/moe --memory-share 50%
      moeless serve ./OLMoE-1B-7B --pool /tmp/moe --port 8001
      moeless pool list --pool /tmp/moe
    """


@pool.command(name="serve")
@click.option(
    "--pool",
    "directory",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Directory for the pool's sockets; made with mode 0700 if it is not there.",
)
@click.option(
    "--devices",
    default="cpu:2",
    show_default=True,
    help="The device pool: cpu:N for N workers, cuda:0,1 for GPUs.",
)
@click.option(
    "--device-memory",
    required=True,
    metavar="SIZE",
    help="Memory for experts on each device, of all models together, such as 512MB.",
)
@click.option(
    "--linger",
    type=FiniteRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the experts of a model stay on devices when its last engine has left.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How lines on stderr look; json is one object a line.",
)
@worker_options
def serve(directory: Path, **options: Any) -> int:
    """Serve a pool until SIGTERM or Ctrl-C.

    Engines attach with moeless serve MODEL --pool DIR, as many as you like. Engines of the same
    model share its experts. Models share the devices' memory: each is guaranteed what its
    --memory-share says, and what is left goes to those that have requests. An engine that ends or
    is killed disturbs no other. Only the user who runs the pool can reach it.

    \b
    Examples:
      moeless pool serve --pool /tmp/moe --devices cpu:2 --device-memory 1GB
      moeless pool serve --pool /run/user/1000/moe --devices cuda:0,1,2,3 --device-memory 60GB
    """
    configure_logging(options["log_format"])
    devices = parse_devices(options["devices"])
    config = ExpertsConfig(
        devices=devices,
        max_devices=with_headroom(options.pop("max_devices"), len(devices)),
        device_memory_bytes=parse_bytes(options["device_memory"], option="--device-memory"),
        linger_s=options["linger"],
        **worker_fields(options),
    )
    from moeless.bootstrap.serving.pool import serve_pool

    def announce() -> None:
        count = len(devices)
        them = f"{count} devices" if count > 1 else "one device"
        click.echo(f"moeless: a pool of {them} is served in {directory} (Ctrl-C stops)")

    ended_by = serve_pool(config, directory, on_ready=announce)
    return TERMINATED if ended_by == signal.SIGTERM else 0


@pool.command(name="list")
@click.option(
    "--pool",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the pool; default: the only one of yours that runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with bytes as numbers.")
def list_models(directory: Path | None, as_json: bool) -> None:
    """Show the models of a running pool: who uses them, and what they hold.

    \b
    States:
      starting   workers learn the model
      busy       it has requests
      idle       it has none: what it holds beyond its share goes to busy models
      asleep     it has had none for a minute: its share does as well
      left       its last engine has gone

    \b
    Examples:
      moeless pool list
      moeless pool list --pool /tmp/moe --json
    """
    with AdminClient(find_pool(directory).admin_socket) as admin:
        found = admin.list_models()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = [
        (
            each["model"],
            each["state"],
            str(each["engines"]),
            each["share"],
            show_bytes(each["guaranteed_bytes"]),
            show_bytes(each["held_bytes"]),
            f"{each['instances']:,}",
        )
        for each in found
    ]
    names = ("model", "state", "engines", "share", "guaranteed", "held", "instances")
    show_table(names, rows, left={"model", "state"})
