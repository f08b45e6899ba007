"""Layouts and specs as JSON text, for worker processes.

This module must not need torch.
"""

import json
from dataclasses import asdict
from typing import Any

from moeless.core.checkpoint import ExpertLayout, TensorSource
from moeless.core.model import ExpertShape, ModelSpec
from moeless.errors import CheckpointError, ModelError


def layout_to_json(layout: ExpertLayout) -> str:
    """Write a layout."""
    return json.dumps(asdict(layout))


def layout_from_json(text: str) -> ExpertLayout:
    """Read a layout that ``layout_to_json`` wrote.

    Raises:
        CheckpointError: The text is something else.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        sources: dict[str, Any] = {name: _read_source(value) for name, value in fields.items()}
        return ExpertLayout(**sources)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"not an expert layout: {error}") from error


def spec_to_json(spec: ModelSpec) -> str:
    """Write a model spec."""
    return json.dumps(asdict(spec))


def spec_from_json(text: str) -> ModelSpec:
    """Read a spec that ``spec_to_json`` wrote.

    Raises:
        ModelError: The text is something else, or no Mixture of Experts.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["layer_ids"] = tuple(fields["layer_ids"])
        fields["expert"] = ExpertShape(**fields["expert"])
        return ModelSpec(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"not a model spec: {error}") from error


def _read_source(value: dict[str, Any] | None) -> TensorSource | None:
    if value is None:
        return None
    rows, columns = value["block"]
    return TensorSource(**{**value, "keys": tuple(value["keys"]), "block": (rows, columns)})
