"""Field types that JSON schema alone cannot state."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from moeless.core.generation import read_content
from moeless.errors import RequestError

MAX_STOP_CHARS = 1024
# Ids are 32-bit in every tokenizer; the engine knows the vocabulary's true size.
_MAX_TOKEN_ID = 2**31

TokenIds = tuple[int, ...]


def refuse(reason: str) -> PydanticCustomError:
    """A validation error whose message is ``reason``."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason})


# eq=False: typing caches equal annotations, and Neutral((0,)) would equal Neutral((False,)).
@dataclass(frozen=True, eq=False)
class Neutral:
    """A field of OpenAI's API that cannot be honoured: only values that ask for nothing pass.

    Args:
        allowed: The values, besides null, that change nothing.
    """

    allowed: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        """Return ``value``, or refuse it."""
        if value is None or any(_same_json(value, neutral) for neutral in self.allowed):
            return value
        offer = "".join(f" or send {json.dumps(neutral)}" for neutral in self.allowed[:1])
        raise refuse(f"this value is not supported; leave the field out{offer}")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.allowed], "description": "Accepted for compatibility only."}


def _same_json(value: Any, other: Any) -> bool:
    # Python holds True == 1; JSON does not.
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _parse_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refuse("must be a string or a list of strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise refuse(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _parse_prompt(value: Any) -> tuple[str | TokenIds, ...]:
    if isinstance(value, str):
        value = [value]
    elif _is_token_ids(value):
        return (tuple(value),)
    if not isinstance(value, list):
        raise refuse("must be a string, a list of strings, token ids or lists of token ids")
    if not value or any(isinstance(prompt, str | list) and not prompt for prompt in value):
        raise refuse("the prompt is empty: give at least one token")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(value)
    if all(_is_token_ids(prompt) for prompt in value):
        return tuple(tuple(ids) for ids in value)
    raise refuse(
        f"must be a string, a list of strings, token ids (0 to {_MAX_TOKEN_ID - 1}) "
        "or lists of token ids, not a mixture"
    )


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < _MAX_TOKEN_ID for token in value)
    )


def _parse_content(value: Any) -> str:
    try:
        return read_content(value)
    except RequestError as error:
        raise refuse(str(error)) from None


Stop = Annotated[
    tuple[str, ...], PlainValidator(_parse_stop, json_schema_input_type=str | list[str] | None)
]
Prompt = Annotated[
    tuple[str | TokenIds, ...],
    PlainValidator(
        _parse_prompt,
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    ),
]
Content = Annotated[
    str, PlainValidator(_parse_content, json_schema_input_type=str | list[dict[str, str]])
]
