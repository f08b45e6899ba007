"""Where the prompt is in one record of the data sets that people have."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moeless.core.generation import read_content

PLAIN_FIELDS: Final = ("prompt", "text")
TURN_FIELDS: Final = ("conversation", "conversations", "messages", "turns")

_SPEAKERS: Final = frozenset({"human", "user"})


def find_prompt(record: object) -> str | None:
    """The prompt of a record; for a conversation, the first turn of the human.

    Tried in order: ``prompt``, ``text``, then ``conversation``, ``conversations``, ``messages``,
    ``turns`` and ``prompt`` as conversations. Turns are texts, or objects with
    ``role``/``content`` or ``from``/``value``; contents are what the server takes, texts or lists
    of text parts. What has none of these but a ``body`` is a line of OpenAI's batch format.

    Args:
        record: A decoded JSON or Parquet record.

    Returns:
        The text, empty where there is no word of a human; None where no field is known.

    Raises:
        RequestError: The turn has other parts than text.
    """
    if not isinstance(record, Mapping):
        return None
    for name in PLAIN_FIELDS:
        if isinstance(record.get(name), str):
            return str(record[name])
    for name in (*TURN_FIELDS, "prompt"):
        turns = record.get(name)
        if isinstance(turns, Sequence) and not isinstance(turns, str):
            return _first_turn(turns)
    return find_prompt(record["body"]) if isinstance(record.get("body"), Mapping) else None


def _first_turn(turns: Sequence[Any]) -> str:
    for turn in turns:
        if isinstance(turn, str):
            return turn
        if not isinstance(turn, Mapping):
            continue
        speaker, content = turn.get("role", turn.get("from")), turn.get("content")
        content = turn.get("value") if content is None else content
        if speaker in _SPEAKERS and content:
            text = read_content(_without_nulls(content))
            if text.strip():
                return text
    return ""


def _without_nulls(content: Any) -> Any:
    """Parts without fields that are null: a column of Parquet has every part's fields in all."""
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in part.items() if value is not None}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]
