"""What a routing trace says about itself: the JSON document in its ``meta`` array."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeless.errors import TraceError

Unit = Literal["steps", "requests"]

MAX_EXPERTS = 32767
"""Expert ids are int16."""

_TEXT_FIELDS = ("model", "unit", "phase", "source", "licence")
_COUNT_FIELDS = ("num_layers", "num_experts", "top_k")
_REQUIRED = ("model", *_COUNT_FIELDS, "layer_ids", "unit", "phase", "source", "licence")


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    """Shape and origin of a routing trace.

    Args:
        model: Name of the model that was routed, for example ``mistralai/Mixtral-8x7B-v0.1``.
        num_layers: MoE layers, L.
        num_experts: Logical experts per layer, E.
        top_k: Experts that every token is sent to, K.
        layer_ids: The model's own index of each MoE layer, ascending, L of them.
        unit: What one entry is: an engine ``steps`` (with a time) or one of many ``requests``.
        phase: What the tokens were: ``prefill``, ``decode``, ``mixed``, with a remark.
        source: Where the counts come from.
        licence: Licence of the data.
        predictor: What made ``predicted``: at least ``kind`` and ``distance`` (in layers).
        extra: Further keys of the document; kept and written back.

    Raises:
        TraceError: A field has another type or a value out of range.
    """

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    layer_ids: tuple[int, ...]
    unit: Unit
    phase: str
    source: str
    licence: str
    predictor: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TEXT_FIELDS:
            _require_text(getattr(self, name), name)
        for name in _COUNT_FIELDS:
            _require_count(getattr(self, name), name, at_least=1)
        if self.num_experts > MAX_EXPERTS:
            raise TraceError(
                f"meta.num_experts is {self.num_experts}; expert ids are int16, so at most "
                f"{MAX_EXPERTS}"
            )
        if self.top_k > self.num_experts:
            raise TraceError(
                f"meta.top_k is {self.top_k}, more than meta.num_experts ({self.num_experts})"
            )
        if self.unit not in ("steps", "requests"):
            raise TraceError(f"meta.unit is {self.unit!r}; use 'steps' or 'requests'")
        _check_layer_ids(self.layer_ids, self.num_layers)
        _check_predictor(self.predictor)

    def to_json(self) -> str:
        """The JSON document.

        Raises:
            TraceError: ``predictor`` or ``extra`` holds what JSON cannot, or ``extra`` hides a
                field.
        """
        known: dict[str, Any] = {name: getattr(self, name) for name in _REQUIRED}
        if self.predictor is not None:
            known["predictor"] = self.predictor
        hidden = sorted({*_REQUIRED, "predictor"} & self.extra.keys())
        if hidden:
            raise TraceError(f"meta.extra has the key {hidden[0]!r}, which is a field; rename it")
        try:
            return json.dumps({**known, **self.extra}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TraceError(f"meta cannot be written as JSON: {error}") from error


def parse_meta(text: str) -> TraceMeta:
    """Read the JSON document.

    Args:
        text: The content of the ``meta`` array.

    Raises:
        TraceError: It is not a JSON object, or a field is missing or wrong.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"meta is not JSON ({error}); write it with json.dumps") from error
    if not isinstance(document, dict):
        raise TraceError(f"meta is a JSON {type(document).__name__}; it must be an object")
    missing = [name for name in _REQUIRED if name not in document]
    if missing:
        raise TraceError(f"meta lacks {', '.join(missing)}; add it to the JSON object")
    layer_ids = document["layer_ids"]
    if not isinstance(layer_ids, list):
        raise TraceError(f"meta.layer_ids is {_short(layer_ids)}; it must be a list of integers")
    known = {name: document[name] for name in (*_REQUIRED, "predictor") if name in document}
    known["layer_ids"] = tuple(layer_ids)
    extra = {name: value for name, value in document.items() if name not in known}
    return TraceMeta(**known, extra=extra)


def _check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    if len(layer_ids) != num_layers:
        raise TraceError(
            f"meta.layer_ids names {len(layer_ids)} layers, but meta.num_layers is {num_layers}"
        )
    for value in layer_ids:
        _require_count(value, "layer_ids", at_least=0)
    for before, after in itertools.pairwise(layer_ids):
        if after <= before:
            raise TraceError(
                f"meta.layer_ids has {after} after {before}; list each layer once, ascending"
            )


def _check_predictor(predictor: object) -> None:
    if predictor is None:
        return
    if not isinstance(predictor, Mapping):
        raise TraceError(
            f"meta.predictor is {_short(predictor)}; it must be an object with kind and distance"
        )
    missing = [name for name in ("kind", "distance") if name not in predictor]
    if missing:
        raise TraceError(f"meta.predictor lacks {' and '.join(missing)}")
    _require_text(predictor["kind"], "predictor.kind")
    _require_count(predictor["distance"], "predictor.distance", at_least=0)


def _require_text(value: object, name: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise TraceError(f"meta.{name} is {_short(value)}; it must be a non-empty string")


def _require_count(value: object, name: str, *, at_least: int) -> None:
    # JSON's true is an int to Python.
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise TraceError(f"meta.{name} is {_short(value)}; it must be an integer >= {at_least}")


def _short(value: object) -> str:
    """A value on one line, cut where a hostile file would fill the screen."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
