"""Options that the commands of ``moeless predictor`` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_Command = Callable[..., Any]


def parse_sizes(_: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read a list of positive integers, such as ``1,2,3``; ascending, each once.

    Raises:
        BadParameter: It is no such list.
    """
    try:
        found = sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of integers such as 1,2,3", param=param
        ) from None
    if found[0] < 1:
        raise click.BadParameter(f"{value!r} has {found[0]}; use positive integers", param=param)
    return tuple(found)


def source_options(command: _Command) -> _Command:
    """Options that say how a model is recorded, where one is given instead of a recording."""
    options = [
        click.option(
            "--prompts",
            metavar="FILE|sharegpt|arena",
            help="Record MODEL on these prompts first.",
        ),
        click.option(
            "--gate-inputs",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Keep that recording in DIR; continued if a part is there.",
        ),
        click.option(
            "--max-recorded-tokens",
            type=click.IntRange(min=1),
            default=16_384,
            show_default=True,
            metavar="N",
            help="Tokens to record.",
        ),
        click.option(
            "--devices",
            default="cpu:1",
            show_default=True,
            help="Where experts run while recording: cpu:N, or cuda:0,1 for GPUs.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Of prompts, divisions and all draws.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
