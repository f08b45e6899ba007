"""What a directory of gate inputs says about itself: ``manifest.json``."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moeless.core.model import DTYPE_BYTES
from moeless.core.router import RouterRule
from moeless.errors import TraceError, os_reason
from moeless.learned.shards.files import written_durably

MANIFEST_FILE = "manifest.json"
GATES_FILE = "gates.safetensors"

_FORMAT, _VERSION = "moeless-gate-inputs", 1


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One file of tokens.

    Args:
        file: Its name within the directory.
        tokens: T, its rows.
        first_conversation: The smallest conversation index in it.
        last_conversation: The largest.
        sha256: Of the file, in hexadecimal.
    """

    file: str
    tokens: int
    first_conversation: int
    last_conversation: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Everything about a recording but the tokens.

    Args:
        model: Id of the model.
        family: Its family.
        num_layers: L, MoE layers.
        num_experts: E, experts per layer.
        top_k: K, experts per token.
        hidden: H, the size of a gate input.
        layer_ids: The model's own index of each MoE layer.
        dtype: Of the gate inputs: ``float32``, ``bfloat16`` or ``float16``.
        gates_sha256: Fingerprint of the model's gates; see ``fingerprint_gates``.
        router_rule: How the gates choose.
        prompts: Where the conversations came from: source, limit, seed.
        shards: The files, in the order of writing.
        complete: Whether the recording got to the end it was asked for.
        config: The resolved options of the recording.

    Raises:
        TraceError: Numbers that no model has, or that contradict each other.
    """

    model: str
    family: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    layer_ids: tuple[int, ...]
    dtype: str
    gates_sha256: str
    router_rule: RouterRule
    prompts: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "hidden"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.top_k > self.num_experts:
            raise TraceError(f"top_k is {self.top_k}, but num_experts is {self.num_experts}")
        if len(self.layer_ids) != self.num_layers:
            raise TraceError(
                f"layer_ids names {len(self.layer_ids)} layers, but num_layers is "
                f"{self.num_layers}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise TraceError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}"
            )
        if self.router_rule.top_k != self.top_k:
            raise TraceError(
                f"router_rule.top_k is {self.router_rule.top_k}, but top_k is {self.top_k}"
            )

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


def read_manifest(directory: Path) -> ShardManifest:
    """Read and check ``manifest.json``.

    Args:
        directory: Holds the recording.

    Raises:
        TraceError: It is missing, damaged, of another format or version, or names no file that a
            recording could have.
    """
    path = Path(directory) / MANIFEST_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise TraceError(
            f"{directory} has no {MANIFEST_FILE}; give a directory that moeless record "
            "--gate-inputs wrote"
        ) from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {os_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not readable JSON; record again") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise TraceError(f"{path} is not a manifest of gate inputs: format is not {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise TraceError(
            f"{path} has version {content.get('version')!r}; this moeless reads version {_VERSION}"
        )
    try:
        return _parse(content)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


_MAY_DIFFER = {"prompts": ("limit",), "config": ("limits", "concurrency", "versions")}
"""What may change when a recording is continued: how much is recorded, not what."""


def require_same_recording(found: ShardManifest, wanted: ShardManifest) -> None:
    """Require that a recording can be continued with other options.

    Args:
        found: What is there.
        wanted: What it is to be continued with.

    Raises:
        TraceError: It would mix two recordings; the first field that differs is named.
    """
    for each in fields(ShardManifest):
        before, now = getattr(found, each.name), getattr(wanted, each.name)
        if each.name in ("shards", "complete"):
            continue
        if each.name in _MAY_DIFFER:
            # As JSON gives it back: tuples are lists there.
            before, now = (json.loads(json.dumps(value)) for value in (before, now))
            for key in sorted(before.keys() | now.keys()):
                if key not in _MAY_DIFFER[each.name] and before.get(key) != now.get(key):
                    raise _differing(f"{each.name}.{key}", before.get(key), now.get(key))
        elif before != now:
            raise _differing(each.name, before, now)


def _differing(name: str, before: Any, now: Any) -> TraceError:
    return TraceError(
        f"cannot continue the recording: {name} was {before!r} and is now {now!r}; use the same "
        "options, or another directory"
    )


def write_manifest(directory: Path, manifest: ShardManifest) -> None:
    """Write ``manifest.json``, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    content = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
    with written_durably(directory / MANIFEST_FILE) as path:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "str | None": (str, type(None)),
}


def _parse(content: dict[str, Any]) -> ShardManifest:
    known = {key: value for key, value in content.items() if key not in ("format", "version")}
    rule = _object(known.get("router_rule"), "router_rule")
    shards = known.get("shards", [])
    layer_ids = known.get("layer_ids")
    if not isinstance(shards, list):
        raise TraceError("shards is not a list")
    if not isinstance(layer_ids, list) or not all(_is_int(index) for index in layer_ids):
        raise TraceError("layer_ids is not a list of whole numbers")
    for key in ("prompts", "config"):
        _object(known.get(key, {}), key)
    known["router_rule"] = _build(RouterRule, rule, "router_rule.")
    known["layer_ids"] = tuple(layer_ids)
    known["shards"] = tuple(
        _parse_entry(_object(shard, f"shards[{n}]"), f"shards[{n}].")
        for n, shard in enumerate(shards)
    )
    manifest: ShardManifest = _build(ShardManifest, known, "")
    return manifest


def _parse_entry(values: dict[str, Any], where: str) -> ShardEntry:
    entry: ShardEntry = _build(ShardEntry, values, where)
    if Path(entry.file).name != entry.file or not entry.file.endswith(".safetensors"):
        raise TraceError(f"{where}file is {entry.file!r}, which is no name of a shard")
    if entry.tokens < 1:
        raise TraceError(f"{where}tokens is {entry.tokens}; a shard has at least 1")
    return entry


def _build(kind: Any, values: dict[str, Any], where: str) -> Any:
    """Make a dataclass from JSON, with one clear line for what does not fit."""
    declared = {each.name: each for each in fields(kind)}
    for name in values:
        if name not in declared:
            raise TraceError(f"{where}{name} is not known; was it written by a newer moeless?")
    for name, each in declared.items():
        expected = _TYPES.get(getattr(each.type, "__name__", str(each.type)))
        if name not in values:
            if each.default is MISSING and each.default_factory is MISSING:
                raise TraceError(f"{where}{name} is missing")
            continue
        value = values[name]
        wrong = expected is not None and not isinstance(value, expected)
        if wrong or (isinstance(value, bool) and expected not in (None, bool)):
            raise TraceError(f"{where}{name} is {value!r}, not of type {each.type}")
    return kind(**values)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{name} is not an object")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
