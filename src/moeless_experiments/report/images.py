"""Pictures as data URIs, so that the report needs no other file."""

import base64
from pathlib import Path
from typing import Final

_LARGEST_SVG_BYTES: Final = 200_000
"""Beyond that a PNG is smaller, and browsers draw it faster."""


def data_uri(directory: Path, picture: str, vector: str | None) -> str:
    """A picture as a data URI; the drawing of lines where it is small, else the dots.

    Args:
        directory: Where it lies.
        picture: Name of the PNG.
        vector: Name of the SVG, if there is one.

    Raises:
        OSError: It cannot be read.
    """
    if vector is not None:
        path = directory / vector
        if path.is_file() and path.stat().st_size <= _LARGEST_SVG_BYTES:
            return _encode("image/svg+xml", path)
    return _encode("image/png", directory / picture)


def _encode(kind: str, path: Path) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
