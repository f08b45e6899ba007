"""Reading server-sent events as a strict client does."""

import json
from typing import Any


def parse_events(body: str) -> list[dict[str, Any]]:
    """The JSON of all events; the last one must be ``[DONE]``."""
    blocks = body.split("\n\n")
    assert blocks[-1] == "", "the stream must end with a whole event"
    assert blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def texts_by_index(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, from chat or completion chunks."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts
