"""Where the prompt is in one record of the data sets that people have."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

PLAIN_FIELDS: Final = ("prompt", "text")
TURN_FIELDS: Final = ("conversation", "conversations", "messages", "turns")

_SPEAKERS: Final = frozenset({"human", "user"})


def find_prompt(record: object) -> str | None:
    """The prompt of a record; for a conversation, the first turn of the human.

    Tried in order: ``prompt``, ``text``, then ``conversation``, ``conversations``, ``messages``
    and ``turns``. Turns are texts, or objects with ``role``/``content`` or ``from``/``value``.

    Args:
        record: A decoded JSON or Parquet record.

    Returns:
        The text, empty where there is no word of a human; None where no field is known.
    """
    if not isinstance(record, Mapping):
        return None
    for name in PLAIN_FIELDS:
        if isinstance(record.get(name), str):
            return str(record[name])
    for name in TURN_FIELDS:
        turns = record.get(name)
        if isinstance(turns, Sequence) and not isinstance(turns, str):
            return _first_turn(turns)
    return None


def _first_turn(turns: Sequence[Any]) -> str:
    for turn in turns:
        if isinstance(turn, str):
            return turn
        if not isinstance(turn, Mapping):
            continue
        speaker, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if speaker in _SPEAKERS and isinstance(text, str) and text.strip():
            return text
    return ""
