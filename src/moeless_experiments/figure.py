"""What an experiment is, and what it gives. Must know neither files nor how figures are found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from moeless_experiments.context import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Provenance = Literal["measured", "emulated", "simulated"]
"""``measured``: ran here on real workers, or counted on a real model's routing. ``emulated``:
each device's share really ran, one after another, and the longest counts. ``simulated``: a cost
model."""

Verdict = Literal["holds", "in part", "does not hold"]
"""What our numbers say of a claim of the paper."""

Cell = str | int | float | bool | None

NOT_IN_OUR_COPY: Final = "not in our copy"
"""The paper's number where its text has none. Numbers are never read off a picture."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that become a CSV file.

    Args:
        name: The file's name without ending. Give what a clock decided a table of its own, so
            that the others are the same bytes whenever the seed is the same.
        columns: Names of the columns; units belong into them (``layer_time_ms``).
        rows: One cell per column; None is left empty.
        provenance: None for that of the whole result.

    Raises:
        ValueError: A row does not have a cell for each column.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name}: {row} has not {len(self.columns)} cells")

    def column(self, name: str) -> list[Cell]:
        """All cells of a column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture.

    Args:
        name: The file's name without ending.
        draw: Draws into an empty figure of the size below.
        inches: Width and height.
        vector: Whether an SVG is written beside the PNG; False for pictures of very many cells.
        caption: What is seen, for those who read the report and those who have it read to them.
    """

    name: str
    draw: "Callable[[Figure], None]"
    inches: tuple[float, float] = (7.5, 4.5)
    vector: bool = True
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number of ours beside the paper's.

    Args:
        what: What is compared, with its unit.
        ours: Our number in a few words; of several cases their range.
        paper: The paper's number if its text has one.
        why: Where they differ: the reason, as far as it is known.
        verdict: Whether the paper's claim holds here; None where it claims nothing, or where
            ours cannot tell. The report lists claims by it.
        cases: Our number by case, where there are several.
    """

    what: str
    ours: str
    paper: str = NOT_IN_OUR_COPY
    why: str = ""
    verdict: Verdict | None = None
    cases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out.

    Args:
        provenance: Where the numbers come from.
        tables: All data, what the plots show included.
        plots: Pictures of them.
        findings: Ours beside the paper's.
        interpretation: One paragraph: what is seen, and where the paper does and does not hold.
        config: Every number and file (by name, not by place) that the result depends on.
    """

    provenance: Provenance
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    findings: tuple[Finding, ...] = ()
    interpretation: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of the paper, or one of our own.

    Args:
        id: ``fig07``, ``table2``, or a word for what the paper does not have.
        title: What it shows.
        claim: What the paper claims with it; for our own, what is asked.
        run: Does it.
        alone: Whether nothing else may run beside it, because clocks decide its numbers.
    """

    id: str
    title: str
    claim: str
    run: Callable[[Context], Result]
    alone: bool = False
