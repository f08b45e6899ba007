"""Text to token ids and back, with a transformers tokenizer. Knows no model."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from moeless.errors import ConfigError, RequestError


class TextCodec:
    """A tokenizer that many threads may use.

    Args:
        tokenizer: A loaded transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Encoding sets padding and truncation inside the tokenizer, which two threads must not.
        self._lock = threading.Lock()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that the tokenizer names as the end of a text."""
        eos_id = self._tokenizer.eos_token_id
        return frozenset() if eos_id is None else frozenset([eos_id])

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text.

        Raises:
            RequestError: The text cannot be encoded.
        """
        try:
            with self._lock:
                return list(self._tokenizer(text)["input_ids"])
        except Exception as error:
            raise RequestError(
                f"the text of {len(text)} characters cannot be encoded "
                f"({type(error).__name__}); it must be valid Unicode",
                param="prompt",
                code="invalid_text",
            ) from error

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            RequestError: There is no chat template, or it refuses these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template; send plain text to the completions API, or have "
                "the server started with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        try:
            with self._lock:
                encoded = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
                )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}",
                param="messages",
                code="invalid_messages",
            ) from error
        return list(encoded["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out, spaces as they are."""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def decode_token(self, token_id: int) -> str:
        """One token as it is shown beside its log-probability, special tokens by name."""
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def read_chat_template(path: Path) -> str:
    """The text of a chat template.

    Raises:
        ConfigError: There is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"the chat template {path} cannot be read: {reason}") from error
    if not text.strip():
        raise ConfigError(f"the chat template {path} is empty; give a file with a Jinja template")
    return text


def use_chat_template(tokenizer: Any, text: str) -> None:
    """Write conversations as a template says, not as the checkpoint's own does.

    Args:
        tokenizer: A loaded transformers tokenizer.
        text: The template, in Jinja.

    Raises:
        ConfigError: It is no template.
    """
    tokenizer.chat_template = text
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is no Jinja template: line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # noqa: BLE001, S110 - it may refuse this conversation and take others
        pass
