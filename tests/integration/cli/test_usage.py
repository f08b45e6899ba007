"""``moeless usage`` on a small ledger."""

import csv
import io

import pyarrow.parquet as pq
import pytest

from moeless.cli.main import run
from moeless.telemetry.ledger.file import begin_run, open_ledger, write_usage
from moeless.telemetry.ledger.meter import KeyCounts, UsageMeter

NOON = 1_800_000_000.0  # 2027-01-15 08:00 UTC


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "usage.db"
    connection = open_ledger(path, create=True)
    begin_run(connection, "r", "m", None, NOON)
    meter = UsageMeter()
    for minute, requests in enumerate((1, 3)):
        keys = {"alice": KeyCounts(requests=requests, generated_tokens=1000 * requests)}
        now_s = NOON + 60 * minute
        write_usage(connection, "r", meter.take(keys, None, now_s), now_s=now_s)
    connection.close()
    return path


def test_a_table_shows_each_key(ledger, capsys):
    assert run(["usage", "--ledger", str(ledger)]) == 0
    out = capsys.readouterr().out
    assert "alice" in out
    assert "3,000" in out


def test_csv_has_plain_numbers_of_the_time_asked_for(ledger, capsys):
    arguments = ["--format", "csv", "--since", "2027-01-15T08:01", "--until", "2027-01-15T09:00"]
    assert run(["usage", "--ledger", str(ledger), *arguments]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row == {
        "model": "m",
        "key": "alice",
        "requests": "2",
        "prompt_tokens": "0",
        "generated_tokens": "2000",
    }


@pytest.mark.parametrize("by", ["key", "model", "function"])
def test_parquet_has_the_columns_even_without_rows(ledger, tmp_path, by):
    out = tmp_path / "usage.parquet"
    arguments = ["--by", by, "--format", "parquet", "--out", str(out)]
    assert run(["usage", "--ledger", str(ledger), *arguments]) == 0
    table = pq.read_table(out)
    assert table.column_names[0] == "model"
    assert len(table) == (by != "function")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "yesterday"], "'yesterday' is no moment"),
        (["--format", "parquet"], "name a file with --out"),
        (["--out", "/nowhere/at/all.csv", "--format", "csv"], "cannot be written"),
        (["--ledger", "/nowhere/usage.db"], "no such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(ledger, capsys, arguments, message):
    assert run(["usage", "--ledger", str(ledger), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_how_long_ago_is_a_moment(ledger, capsys):
    assert run(["usage", "--ledger", str(ledger), "--since", "2h", "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 2, "written in the future, so since then"
