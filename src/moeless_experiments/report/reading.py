"""Results as they lie in a directory: manifests, CSV files, pictures."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from moeless.errors import ConfigError
from moeless_experiments.writing import MANIFEST_FILE


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One experiment's results.

    Args:
        directory: Where they lie.
        manifest: What was written beside them; see ``manifest.describe``.
    """

    directory: Path
    manifest: dict[str, Any]

    @property
    def id(self) -> str:
        """The directory's name, which is the experiment's id."""
        return self.directory.name

    def text(self, key: str) -> str:
        """A text of the manifest, empty where there is none."""
        found = self.manifest.get(key)
        return "" if found is None else str(found)

    def parts(self, key: str) -> list[dict[str, Any]]:
        """A list of the manifest: its findings, tables, plots."""
        return list(self.manifest.get(key, ()))


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that is there.

    Args:
        entries: In the order wanted.
        damaged: Directories whose manifest cannot be used, and why not.
    """

    entries: tuple[Entry, ...]
    damaged: dict[str, str] = field(default_factory=dict)


class Head(NamedTuple):
    """The beginning of a CSV file.

    Args:
        columns: Their names.
        rows: The first ones.
    """

    columns: list[str]
    rows: list[list[str]]


def read_results(out: Path, order: Sequence[str]) -> Results:
    """Read what experiments have written.

    Args:
        out: The directory, with one below it for each experiment.
        order: Ids in the order wanted; others come after them, by name.
    """
    places = {name: place for place, name in enumerate(order)}
    entries, damaged = [], {}
    for path in out.glob(f"*/{MANIFEST_FILE}"):
        if path.parent.name.startswith("."):
            continue  # being written
        try:
            entries.append(_read_entry(path))
        except (OSError, ValueError, ConfigError) as error:
            damaged[path.parent.name] = str(error)
    entries.sort(key=lambda entry: (places.get(entry.id, len(places)), entry.id))
    return Results(entries=tuple(entries), damaged=dict(sorted(damaged.items())))


def read_head(path: Path, rows: int) -> Head:
    """Read the first rows of a CSV file.

    Args:
        path: The file.
        rows: How many, beside the names of the columns.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no CSV file in UTF-8.
    """
    try:
        with path.open(encoding="utf8", newline="") as file:
            found = list(islice(csv.reader(file), rows + 1))
    except csv.Error as error:
        raise ValueError(f"{path.name}: {error}") from error
    return Head(found[0], found[1:]) if found else Head([], [])


def _read_entry(path: Path) -> Entry:
    manifest = json.loads(path.read_text("utf8"))
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    for key in ("findings", "tables", "plots"):
        parts = manifest.get(key, [])
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ConfigError(f"{path.name}: {key} is not a list of JSON objects")
    _require_plain_names(_file_names(manifest))
    return Entry(directory=path.parent, manifest=manifest)


def _file_names(manifest: dict[str, Any]) -> Iterable[object]:
    for table in manifest.get("tables", ()):
        yield table.get("file")
    for plot in manifest.get("plots", ()):
        yield plot.get("file")
        if plot.get("vector") is not None:
            yield plot["vector"]


def _require_plain_names(names: Iterable[object]) -> None:
    """A manifest names files beside it, and no others."""
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name or name == "..":
            raise ConfigError(f"{name!r} is not the name of a file beside {MANIFEST_FILE}")
