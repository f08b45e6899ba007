"""Token ids to text, one token at a time.

This module must not know models, and of tokenizers only a function that decodes ids.
"""

from collections.abc import Callable, Sequence

from moeless.engines.transformers.generation.stop_strings import StopFilter

REPLACEMENT = "\ufffd"
_KEPT_TOKENS = 4
_WINDOW_TOKENS = 12
_UNFINISHED_TOKENS = 32
_CHARACTER_BYTES = 4


class IncrementalDecoder:
    """Text that each new token adds, whole characters only.

    Decoding is not additive: a token may be part of a character, or lose its leading space at
    the start of a text. So a short window of the last tokens is decoded again each time, and
    what goes beyond the text already returned is new. A character that is not complete decodes
    to U+FFFD at the end and is held back.

    Args:
        decode: Ids to text, special tokens left out, no clean-up of spaces.

    Cost on the token path: one decode of at most a dozen ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._returned = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are now complete."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        if len(window) > _UNFINISHED_TOKENS:
            # No character is that long: these bytes are no text, apart from the last few.
            unfinished = min(unfinished, _CHARACTER_BYTES - 1)
        end = max(len(text) - unfinished, self._returned)
        new = text[self._returned : end]
        self._returned = end
        limit = _UNFINISHED_TOKENS if unfinished else _WINDOW_TOKENS
        if len(window) > limit:
            self._forget(len(text) - end)
        return new

    def flush(self) -> str:
        """Return what is held back; the tokens have ended."""
        text = self._decode(self._window) if self._window else ""
        new = text[self._returned :]
        self._returned = len(text)
        return new

    def _forget(self, held: int) -> None:
        """Keep only the last tokens; ``held`` characters at the end are not returned yet."""
        kept = max(_KEPT_TOKENS, 2 * held)
        self._window = self._window[-kept:]
        self._returned = max(0, len(self._decode(self._window)) - held)


class TextAssembler:
    """A request's text: decoded, cut at the first stop string.

    Args:
        decode: Ids to text, special tokens left out, no clean-up of spaces.
        stops: Strings that end the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self._filter.stopped

    def push(self, token_id: int) -> str:
        """Add a token; return the text that may be shown."""
        new = self._decoder.push(token_id)
        return self._filter.push(new) if new else ""

    def finish(self) -> str:
        """No more tokens: return all text that was held back."""
        if self.stopped:
            return ""
        shown = self._filter.push(self._decoder.flush())
        return shown if self.stopped else shown + self._filter.flush()
