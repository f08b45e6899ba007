"""HTML whose texts are always escaped. Must know nothing of experiments."""

from html import escape
from typing import Final

_EMPTY_TAGS: Final = frozenset({"br", "img", "meta", "link"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | bool) -> Markup:
    """An element.

    Args:
        name: Of the element.
        children: What is in it; escaped unless it is ``Markup``.
        attributes: ``class_`` for class, ``data_label`` for data-label. True stands for one
            without a value, False for none.
    """
    pairs = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            pairs.append(f" {attribute}")
        elif value is not False:
            pairs.append(f' {attribute}="{escape(value)}"')
    opening = f"<{name}{''.join(pairs)}>"
    return Markup(opening if name in _EMPTY_TAGS else f"{opening}{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Several after one another, escaped unless they are ``Markup``."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    )


def paragraphs(text: str) -> Markup:
    """Text whose blank lines part paragraphs."""
    return join(*(tag("p", part.strip()) for part in text.split("\n\n") if part.strip()))
