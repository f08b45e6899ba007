"""``moeless inspect``: what a model's functions are and need."""

import json

import click
from rich.console import Console
from rich.table import Table

from moeless.core.cluster import parse_bytes, parse_devices
from moeless.errors import ConfigError


@click.command()
@click.argument("model")
@click.option("--devices", default="cpu:2", show_default=True, help="The device pool.")
@click.option("--device-memory", metavar="SIZE", help="Budget of each device, such as 40GB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(model: str, devices: str, device_memory: str | None, as_json: bool) -> None:
    """Show the layers, experts and bytes per function of MODEL, and what a budget holds.

    Reads the configuration and the headers of the weights only.

    \b
    Examples:
      moeless inspect demo
      moeless inspect ./Mixtral-8x7B-Instruct --devices cuda:0,1 --device-memory 40GB
    """
    pool = parse_devices(devices)
    budget = (
        None if device_memory is None else parse_bytes(device_memory, option="--device-memory")
    )
    from moeless.bootstrap.inspection import inspect_model

    facts = inspect_model(model, pool, budget_bytes=budget)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    if not facts:
        raise ConfigError(f"nothing is known of {model}")
    table = Table(title=str(facts["model"]), show_header=False, title_justify="left")
    for name, value in facts.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        table.add_row(name.replace("_", " "), str(text))
    Console().print(table)
