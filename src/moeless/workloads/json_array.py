"""Elements of a long JSON array, one at a time, also where the file ends before the array does."""

import json
from collections.abc import Iterator
from typing import IO, Any, Final

from moeless.errors import TraceError

MAX_ELEMENT_CHARS: Final = 32 * 2**20
"""What does not end after this many characters is broken, not long."""

_CHUNK_CHARS: Final = 2**20
_SPACE: Final = " \t\r\n"
_CLOSERS: Final = '}]"'


def read_elements(file: IO[str], name: str, *, may_be_cut: bool) -> Iterator[Any]:
    """Decode the elements of the array that a file holds.

    Args:
        file: Open text.
        name: How messages call it.
        may_be_cut: Whether a file that ends within an element, or between two, is fine: what is
            whole is returned.

    Yields:
        The elements, in order.

    Raises:
        TraceError: It is no JSON array, or it is broken or (unless ``may_be_cut``) cut.
    """
    text = _Window(file)
    if text.skip(_SPACE) != "[":
        raise TraceError(f"{name}: not a JSON array; it must begin with '['")
    text.take()
    count, more = 0, text.skip(_SPACE) != "]"
    while more:
        element, end = text.decode(name, count)
        if not end:
            if may_be_cut:
                return
            raise TraceError(
                f"{name}: element {count} is not JSON, or the file ends within it; fetch it again"
            )
        yield element
        count += 1
        mark = text.skip(_SPACE)
        if mark == "" and may_be_cut:
            return
        if mark not in (",", "]") or mark == "":
            found = repr(mark) if mark else "the end of the file"
            raise TraceError(f"{name}: {found} after element {count - 1}; expected ',' or ']'")
        text.take()
        more = mark == ","


class _Window:
    """The part of a file that is being decoded."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._ended = False

    def skip(self, characters: str) -> str:
        """Pass over the characters; return the next other one, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in characters:
                    return self._text[self._at]
                self._at += 1
            if not self._grow(_CHUNK_CHARS):
                return ""

    def take(self) -> None:
        """Pass over one character."""
        self._at += 1

    def decode(self, name: str, count: int) -> tuple[Any, bool]:
        """The next element and True, or None and False where the file ends within it."""
        self.skip(_SPACE)
        decoder = json.JSONDecoder()
        while True:
            try:
                element, end = decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):
                pass
            else:
                # A number at the end of the text may go on in the next chunk.
                if end < len(self._text) or self._text[end - 1] in _CLOSERS:
                    self._at = end
                    return element, True
            pending = len(self._text) - self._at
            if pending > MAX_ELEMENT_CHARS:
                raise TraceError(f"{name}: element {count} is not JSON, or far too long")
            # Doubling keeps repeated decoding linear in the length of an element.
            if not self._grow(max(pending, _CHUNK_CHARS)):
                return None, False

    def _grow(self, size: int) -> bool:
        added = "" if self._ended else self._file.read(size)
        self._ended = self._ended or not added
        self._text = self._text[self._at :] + added
        self._at = 0
        return bool(added)
