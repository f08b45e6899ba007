"""The whole page, and the file that it becomes."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from moeless.core.whole_file import written_whole
from moeless.errors import ConfigError
from moeless_experiments.report.markup import Markup, join, tag
from moeless_experiments.report.overview import render_overview
from moeless_experiments.report.reading import Entry, Results, read_results
from moeless_experiments.report.section import anchor, badge, render_section

REPORT_FILE: Final = "report.html"

_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page may load nothing at all, whatever it says."""


def write_report(out: Path, order: Sequence[str]) -> Path:
    """Write the report of all results in a directory.

    Args:
        out: The directory.
        order: Ids of experiments in the order wanted.

    Returns:
        The report's file.

    Raises:
        ConfigError: It cannot be written.
    """
    path = out / REPORT_FILE
    try:
        with written_whole(path) as partial:
            partial.write_text(render_page(read_results(out, order), order), "utf8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); name another directory"
        ) from error
    return path


def render_page(results: Results, order: Sequence[str]) -> str:
    """The page as HTML.

    Args:
        results: What is shown.
        order: Ids of all experiments; those without results are named.
    """
    style = resources.files(__package__).joinpath("style.css").read_text("utf8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", "MoEless: the paper's evaluation, repeated"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "To the results", href="#results", class_="skip"),
        _header(results),
        tag(
            "main",
            render_overview(results),
            _missing(results, order),
            tag("div", *map(render_section, results.entries), id="results"),
        ),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _header(results: Results) -> Markup:
    entries = results.entries
    quick = sum(bool(entry.manifest.get("quick")) for entry in entries)
    seeds = sorted({entry.text("seed") for entry in entries})
    machines = sorted({entry.text("device") for entry in entries} - {""})
    return tag(
        "header",
        tag("h1", "MoEless: the paper's evaluation, repeated"),
        tag(
            "p",
            f"{len(entries)} results, {quick} of them from quick runs; seed "
            f"{', '.join(seeds) or 'none'}; {'; '.join(machines) or 'no machine named'}. "
            "The paper's numbers are those of its text; none is read off a picture.",
        ),
        tag(
            "p",
            *_legend(),
            class_="legend",
        ),
        _contents(entries),
    )


def _legend() -> list[Markup]:
    return [
        tag("span", badge("measured"), " real workers, or a real model's routing"),
        tag("span", badge("emulated"), " shares really run one after another, the longest counts"),
        tag("span", badge("simulated"), " a cost model"),
    ]


def _contents(entries: Sequence[Entry]) -> Markup:
    items = (
        tag("li", tag("a", f"{entry.id}: {entry.text('title')}", href=f"#{anchor(entry)}"))
        for entry in entries
    )
    return tag(
        "nav", tag("details", tag("summary", "Contents"), tag("ul", *items)), aria_label="Results"
    )


def _missing(results: Results, order: Sequence[str]) -> Markup:
    there = {entry.id for entry in results.entries}
    absent = [name for name in order if name not in there and name not in results.damaged]
    parts = []
    if absent:
        parts.append(
            tag(
                "p",
                f"Not in this directory: {', '.join(absent)}. To add them, run ",
                tag("code", "moeless reproduce NAME --out DIR"),
                " with the same directory.",
            )
        )
    parts += [
        tag("p", f"{name} cannot be shown: {reason}", class_="lack")
        for name, reason in results.damaged.items()
    ]
    return join(*parts)
