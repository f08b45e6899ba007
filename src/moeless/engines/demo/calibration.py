"""Texts on which the model is carved and judged, and how they become token rows.

``calibration.txt`` holds conversations written for this project, then answers that the dense model
itself gave to prompts written for this project (sampled at temperature 0.8, top-p 0.95). The
answers are there for their activation statistics: they are often wrong, and nobody should learn
facts from them. ``evaluation.txt`` is hand-written and on other topics. Knows no model.
"""

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALIBRATION_FILE: Final = "calibration.txt"
EVALUATION_FILE: Final = "evaluation.txt"

_SEPARATOR = re.compile(r"^={5,}$", flags=re.MULTILINE)
_TURN = re.compile(r"\[(system|user|assistant)\]")


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One conversation, rendered with the chat template.

    Args:
        ids: Token ids from the start of the conversation.
        scored_from: First position that counts in a perplexity: what stands before is the
            template's own system prompt, which is the same everywhere.
    """

    ids: tuple[int, ...]
    scored_from: int


def read_packaged(name: str) -> str:
    """Text of a file beside this module."""
    return files("moeless.engines.demo").joinpath(name).read_text(encoding="utf-8")


def parse_conversations(text: str) -> list[list[dict[str, str]]]:
    """Split a text into conversations of ``{"role", "content"}`` turns.

    A line ``[user]``, ``[assistant]`` or ``[system]`` opens a turn; a line of five or more ``=``
    ends a conversation; what stands before a conversation's first turn is a comment.
    """
    conversations = []
    for block in _SEPARATOR.split(text):
        turns: list[dict[str, str]] = []
        for line in block.splitlines():
            opened = _TURN.fullmatch(line)
            if opened:
                turns.append({"role": opened[1], "content": ""})
            elif turns:
                turns[-1]["content"] += line + "\n"
        if turns:
            conversations.append([{**turn, "content": turn["content"].strip()} for turn in turns])
    return conversations


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: list[list[dict[str, str]]],
    *,
    row_tokens: int,
) -> list[TokenRow]:
    """Render conversations with the chat template, one row each.

    Every row starts where a real request starts: the first position carries activations a hundred
    times larger than the others, and a carving that never saw them breaks the model.

    Args:
        tokenizer: The dense model's.
        conversations: As :func:`parse_conversations` returns them.
        row_tokens: A row is cut after this many tokens.
    """
    rows: list[TokenRow] = []
    for turns in conversations:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        assert isinstance(text, str)
        before = text.find("<|im_start|>user") if turns[0]["role"] != "system" else 0
        prefix = tokenizer(text[:before], add_special_tokens=False)["input_ids"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:row_tokens]
        rows.append(TokenRow(ids=tuple(ids), scored_from=max(1, len(prefix))))
    return rows
