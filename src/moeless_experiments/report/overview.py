"""The top of the report: the paper's numbers beside ours, and what does and does not hold."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from moeless_experiments.report.markup import Markup, join, tag
from moeless_experiments.report.reading import Entry, Results
from moeless_experiments.report.section import anchor, badge, verdict_sign
from moeless_experiments.report.tables import cards

_HEADINGS: Final = (
    ("holds", "Holds"),
    ("in part", "Holds in part"),
    ("does not hold", "Does not hold"),
)


def render_overview(results: Results) -> Markup:
    """Comparisons and verdicts of all experiments."""
    return join(_comparisons(results.entries), _verdicts(results.entries))


def _findings(entries: Sequence[Entry]) -> Iterator[tuple[Entry, dict[str, Any]]]:
    for entry in entries:
        for finding in entry.parts("findings"):
            yield entry, finding


def _link(entry: Entry) -> Markup:
    return tag("a", entry.id, href=f"#{anchor(entry)}")


def _comparisons(entries: Sequence[Entry]) -> Markup:
    rows = [
        (
            _line(str(finding.get("what", ""))),
            _line(str(finding["paper"])),
            _line(str(finding.get("ours", ""))),
            verdict_sign(finding.get("verdict")) or "–",
            join(_link(entry), " ", badge(entry.text("provenance"))),
        )
        for entry, finding in _findings(entries)
        if any(character.isdigit() for character in str(finding.get("paper", "")))
    ]
    if not rows:
        return Markup("")
    return tag(
        "section",
        tag("h2", "The paper's numbers beside ours", id="numbers"),
        cards(
            "Every number that the paper's text gives for what was run here. Single cases and "
            "reasons for differences are with each result.",
            ("What", "Paper", "Ours", "Claim", "Result"),
            rows,
            lines=True,
        ),
        aria_labelledby="numbers",
    )


def _verdicts(entries: Sequence[Entry]) -> Markup:
    parts: list[Markup] = []
    for verdict, heading in _HEADINGS:
        items = [
            tag("li", f"{finding.get('what', '')} (", _link(entry), ")")
            for entry, finding in _findings(entries)
            if finding.get("verdict") == verdict
        ]
        if items:
            parts += [tag("h3", f"{heading} ({len(items)})"), tag("ul", *items)]
    if not parts:
        return Markup("")
    return tag(
        "section",
        tag("h2", "What holds and what does not", id="verdicts"),
        *parts,
        aria_labelledby="verdicts",
    )


def _line(text: str) -> Markup:
    """Text that a wide screen cuts where its line ends; pointing at it shows the whole."""
    return tag("span", text, class_="line", title=text)
