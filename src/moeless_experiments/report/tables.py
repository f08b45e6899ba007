"""Tables that scroll where they are wide, or fall into cards on a phone."""

from collections.abc import Sequence

from moeless_experiments.report.markup import Markup, join, tag


def cards(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, lines: bool = False
) -> Markup:
    """A table of texts; on a narrow screen each row becomes a card with labelled lines.

    Args:
        caption: What it shows, for everybody.
        columns: Heads.
        rows: Cells, escaped unless they are ``Markup``; the first names its row.
        lines: Whether each row is to take one line where there is room.
    """
    # The roles are said again because a table that is laid out as blocks loses them.
    head = tag(
        "tr",
        *(tag("th", name, scope="col", role="columnheader") for name in columns),
        role="row",
    )
    body = []
    for first, *others in rows:
        cells = [tag("th", first, scope="row", role="rowheader", data_label=columns[0])]
        for name, cell in zip(columns[1:], others, strict=True):
            cells.append(tag("td", cell, role="cell", data_label=name))
        body.append(tag("tr", *cells, role="row"))
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        class_="cards lines" if lines else "cards",
        role="table",
    )


def data(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table of data, which scrolls sideways.

    Args:
        caption: What it shows.
        columns: Heads.
        rows: Cells; numbers are set to the right.
    """
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", *(_cell(cell) for cell in row)) for row in rows]
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", join(*body)),
        class_="data",
    )
    # What scrolls must be reachable by keyboard, and then needs a name.
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: str) -> Markup:
    try:
        float(cell)
    except ValueError:
        return tag("td", cell)
    return tag("td", cell, class_="number")
