"""``moeless usage``: what a ledger says."""

import csv
import datetime
import io
import re
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from moeless.errors import ConfigError, os_reason
from moeless.telemetry.ledger.file import open_ledger
from moeless.telemetry.ledger.usage import (
    Grouping,
    UsageTable,
    count_missing_minutes,
    read_usage,
)
from moeless.telemetry.ledger.writer import unix_now_s

_AGO = re.compile(r"(\d{1,6})\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Moment(click.ParamType[float]):
    """A date, a time (UTC unless it says otherwise), or how long ago; as Unix seconds."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read an option's text."""
        text = str(value).strip()
        if ago := _AGO.fullmatch(text):
            return unix_now_s() - int(ago[1]) * _SECONDS[ago[2]]
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r} is no moment; use 2026-11-30, 2026-11-30T12:00 or 24h", param, ctx
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp()


@click.command()
@click.option(
    "--ledger",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What moeless serve --ledger wrote, or is writing.",
)
@click.option(
    "--by",
    type=click.Choice(["key", "model", "function"]),
    default="key",
    show_default=True,
    help="What a line stands for.",
)
@click.option(
    "--since",
    type=Moment(),
    metavar="WHEN",
    help="From this date or time (UTC) on, or so long ago: 2026-11-30, 24h, 7d; to the minute, "
    "for functions to the hour.",
)
@click.option("--until", type=Moment(), metavar="WHEN", help="Up to this date or time.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "csv", "parquet"]),
    default="table",
    show_default=True,
    help="How to show it; parquet needs --out.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to FILE instead of the terminal.",
)
def usage(
    ledger: Path,
    by: Grouping,
    since: float | None,
    until: float | None,
    output_format: str,
    out: Path | None,
) -> None:
    """Show who used how much: requests, tokens, and GB s in each accounting.

    \b
    Examples:
      moeless usage --ledger usage.db --since 24h
      moeless usage --ledger usage.db --by model --since 2026-11-01 --until 2026-12-01
      moeless usage --ledger usage.db --by function --format parquet --out functions.parquet
    """
    if output_format == "parquet" and out is None:
        raise ConfigError("--format parquet cannot be shown: name a file with --out")
    connection = open_ledger(ledger, create=False)
    try:
        table = read_usage(connection, by=by, since_s=since, until_s=until)
        missing = count_missing_minutes(connection, since_s=since, until_s=until)
    finally:
        connection.close()
    if missing:
        click.echo(
            f"moeless: warning: {missing} minutes of usage are missing: {ledger} could not be "
            f"written to (see the table gaps)",
            err=True,
        )
    try:
        if output_format == "parquet":
            assert out is not None
            _write_parquet(table, out)
            return
        text = _as_csv(table) if output_format == "csv" else _as_table(table)
        if out is None:
            click.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--out {out} cannot be written: {os_reason(exc)}") from None


def _as_csv(table: UsageTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def _as_table(table: UsageTable) -> str:
    width = None if sys.stdout.isatty() else 200
    console = Console(file=io.StringIO(), width=width, highlight=False)
    shown = Table()
    for name in table.columns:
        text = name in {"model", "key"}
        shown.add_column(name.replace("_", " "), justify="left" if text else "right")
    for row in table.rows:
        shown.add_row(*(_show(value) for value in row))
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _show(value: object) -> str:
    return (
        f"{value:,.3f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _write_parquet(table: UsageTable, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    arrays = {name: list(column) for name, column in zip(table.columns, columns, strict=True)}
    pq.write_table(pa.table(arrays), out)
