"""Arrival traces: when requests came, and how long their prompts and answers were.

Reads the CSV of the Azure LLM inference traces (``TIMESTAMP,ContextTokens,GeneratedTokens``).
Knows nothing about experts.
"""

import csv
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError, os_reason
from moeless.workloads.input_file import require_file
from moeless.workloads.trace_checks import check_not_negative, check_times

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

MAX_TOKENS: Final = 2**31 - 1

_TIMESTAMP = re.compile(
    r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?(Z|[+-]\d{2}:?\d{2})?", re.ASCII
)
_COUNT = re.compile(r"\d{1,10}", re.ASCII)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """R requests in the order of their arrival.

    Args:
        time_s_R: Seconds since the first request, ascending from 0, float64 [R].
        prompt_tokens_R: Tokens of each prompt, int64 [R].
        generated_tokens_R: Tokens of each answer, int64 [R].

    Raises:
        TraceError: There is no request, times do not ascend from 0, or a count is negative.
    """

    time_s_R: NDArray[np.float64]
    prompt_tokens_R: NDArray[np.int64]
    generated_tokens_R: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise TraceError("no requests in the arrival trace; it needs at least one")
        check_times(self.time_s_R)
        if self.time_s_R[0] != 0:
            raise TraceError(f"arrivals begin at {self.time_s_R[0]} s; count from the first one")
        for name in ("prompt_tokens", "generated_tokens"):
            check_not_negative(getattr(self, f"{name}_R"), name)

    def __len__(self) -> int:
        """R."""
        return len(self.time_s_R)


def read_arrivals(path: Path) -> Arrivals:
    """Read an arrival trace.

    Columns are found by name, in any order and case; further ones and blank lines are ignored.
    Times without a zone are taken as UTC. Fractions of a second keep all nine digits: a request
    just before a full second must not slip into the next.

    Args:
        path: A CSV file.

    Raises:
        TraceError: The file cannot be read, or a row is wrong; the message has its line number.
    """
    require_file(path, "an arrival trace (CSV)")
    times_ns, prompts, answers = array("q"), array("q"), array("q")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = _rows(path, csv.reader(file))
            _, header = next(rows, (1, []))
            where = _find_columns(path, header)
            for line, row in rows:
                time_ns, prompt, answer = _parse_row(path, line, row, where)
                if times_ns and time_ns < times_ns[-1]:
                    raise TraceError(
                        f"{path}, line {line}: {COLUMNS[0]} goes back; sort the rows by time"
                    )
                times_ns.append(time_ns)
                prompts.append(prompt)
                answers.append(answer)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file ({error.reason}); name a CSV file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({os_reason(error)})") from error
    if not times_ns:
        raise TraceError(f"{path}: no requests after the header; add at least one row")
    # Differences of integers first: seconds since 1970 as floats would lose the last digits.
    since_ns_R = np.array(times_ns, dtype=np.int64) - times_ns[0]
    return Arrivals(
        time_s_R=since_ns_R / 1e9,
        prompt_tokens_R=np.array(prompts, dtype=np.int64),
        generated_tokens_R=np.array(answers, dtype=np.int64),
    )


def _rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, with the number of their (last) line."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
        if any(cell.strip() for cell in row):
            yield reader.line_num, row


def _find_columns(path: Path, header: list[str]) -> list[int]:
    """Positions of ``COLUMNS``."""
    names = [name.strip().casefold() for name in header]
    missing = [name for name in COLUMNS if name.casefold() not in names]
    if missing:
        raise TraceError(
            f"{path}, line 1: the header lacks {', '.join(missing)}; it must name "
            f"{','.join(COLUMNS)}"
        )
    return [names.index(name.casefold()) for name in COLUMNS]


def _parse_row(path: Path, line: int, row: list[str], where: list[int]) -> tuple[int, int, int]:
    """Time in nanoseconds since 1970, prompt tokens, generated tokens."""
    if len(row) <= max(where):
        raise TraceError(
            f"{path}, line {line}: {len(row)} columns; the header promises at least "
            f"{max(where) + 1}"
        )
    stamp, prompt, answer = (row[column].strip() for column in where)
    try:
        return _parse_time_ns(stamp), _parse_count(prompt, 1), _parse_count(answer, 2)
    except ValueError as error:
        raise TraceError(f"{path}, line {line}: {error}") from error


def _parse_time_ns(text: str) -> int:
    wrong = f"{COLUMNS[0]} is {text[:60]!r}; write it as 2023-11-16 18:15:46.6805900"
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(wrong)
    try:
        second = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError as error:
        raise ValueError(wrong) from error
    aware = second if second.tzinfo else second.replace(tzinfo=UTC)
    return int(aware.timestamp()) * 10**9 + int((match[2] or "").ljust(9, "0"))


def _parse_count(text: str, column: int) -> int:
    if not _COUNT.fullmatch(text) or int(text) > MAX_TOKENS:
        raise ValueError(
            f"{COLUMNS[column]} is {text[:60]!r}; it must be an integer from 0 to {MAX_TOKENS}"
        )
    return int(text)
