"""One experiment in the report: claim, findings, plots, what is seen, data, how it was made."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from moeless_experiments.report.images import data_uri
from moeless_experiments.report.markup import Markup, join, paragraphs, tag
from moeless_experiments.report.reading import Entry, read_head
from moeless_experiments.report.tables import cards, data

PREVIEW_ROWS: Final = 12

_MEANINGS: Final = {
    "measured": "ran here on real workers, or counted on a real model's routing",
    "emulated": "each device's share really ran, one after another; the longest counts",
    "simulated": "a cost model",
}


def anchor(entry: Entry) -> str:
    """Where in the page an experiment is."""
    return f"result-{quote(entry.id, safe='')}"


def badge(provenance: str) -> Markup:
    """Where numbers come from, as a small sign."""
    kind = provenance if provenance in _MEANINGS else "unknown"
    meaning = _MEANINGS.get(provenance, "not said")
    return tag("span", provenance or "not said", class_=f"badge {kind}", title=meaning)


def verdict_sign(verdict: object) -> Markup:
    """Whether a claim holds, as a small sign; nothing where that is not said."""
    if verdict not in ("holds", "in part", "does not hold"):
        return Markup("")
    return tag("span", str(verdict), class_=f"verdict {str(verdict).replace(' ', '-')}")


def render_section(entry: Entry) -> Markup:
    """An experiment's part of the page."""
    title = f"{entry.id}: {entry.text('title')}"
    quick = " (a quick run: fewer models, tokens and steps)" if entry.manifest.get("quick") else ""
    return tag(
        "section",
        tag("h2", title, id=f"{anchor(entry)}-title"),
        tag("p", badge(entry.text("provenance")), f" seed {entry.text('seed')}{quick}"),
        _claim(entry),
        _findings(entry),
        join(*_figures(entry)),
        tag("h3", "What is seen"),
        paragraphs(entry.text("interpretation")),
        _tables(entry),
        _making(entry),
        id=anchor(entry),
        aria_labelledby=f"{anchor(entry)}-title",
    )


def _claim(entry: Entry) -> Markup:
    claim = entry.text("claim")
    if not claim:
        return Markup("")
    return tag("div", tag("h3", "Claim"), paragraphs(claim), class_="claim")


def _findings(entry: Entry) -> Markup:
    findings = entry.parts("findings")
    if not findings:
        return Markup("")
    rows = [
        (
            str(each.get("what", "")),
            str(each.get("paper", "")),
            join(str(each.get("ours", "")), " ", verdict_sign(each.get("verdict")), _cases(each)),
            str(each.get("why") or "") or "–",
        )
        for each in findings
    ]
    columns = ("What", "Paper", "Ours", "Why they differ")
    shown = 4 if any(each.get("why") for each in findings) else 3
    table = cards(
        f"{entry.id}: the paper's numbers and ours", columns[:shown], [row[:shown] for row in rows]
    )
    return join(tag("h3", "Findings"), table)


def _cases(finding: Mapping[str, Any]) -> Markup:
    """Our number by case, folded away."""
    cases = finding.get("cases")
    if not isinstance(cases, Mapping) or not cases:
        return Markup("")
    items = (tag("li", f"{label}: {value}") for label, value in cases.items())
    return tag("details", tag("summary", f"by case ({len(cases)})"), tag("ul", *items))


def _figures(entry: Entry) -> Iterator[Markup]:
    for plot in entry.parts("plots"):
        name = plot["file"].rpartition(".")[0].replace("_", " ")
        caption = str(plot.get("caption") or "") or f"{entry.text('title')}: {name}."
        try:
            source = data_uri(entry.directory, plot["file"], plot.get("vector"))
        except OSError as error:
            yield tag(
                "p", f"{plot['file']} cannot be shown: {error.strerror or error}", class_="lack"
            )
            continue
        alt = f"Plot for {entry.id}. {caption} The numbers are in the CSV files below."
        image = tag("img", src=source, alt=alt, loading="lazy")
        # On a phone it keeps a size at which its labels can be read, and scrolls.
        frame = tag("div", image, class_="scroll", tabindex="0", role="region", aria_label=caption)
        yield tag("figure", frame, tag("figcaption", caption))


def _tables(entry: Entry) -> Markup:
    parts = [_table(entry, table) for table in entry.parts("tables")]
    return join(tag("h3", "Data"), *parts) if parts else Markup("")


def _table(entry: Entry, table: Mapping[str, Any]) -> Markup:
    name, count = table["file"], table.get("rows")
    link = tag("a", name, href=f"{quote(entry.id)}/{quote(name)}", download=True)
    own = str(table.get("provenance") or "")
    sign = badge(own) if own and own != entry.text("provenance") else Markup("")
    line = tag("p", link, f" ({count} rows) ", sign)
    try:
        head = read_head(entry.directory / name, PREVIEW_ROWS)
    except (OSError, ValueError) as error:
        return join(line, tag("p", f"{name} cannot be shown: {error}", class_="lack"))
    shown = len(head.rows)
    caption = f"{name}: " + ("all rows" if shown == count else f"the first {shown} rows")
    return join(
        line,
        tag("details", tag("summary", caption), data(caption, head.columns, head.rows)),
    )


def _making(entry: Entry) -> Markup:
    """How it was made: all of the manifest that is not shown above."""
    found = entry.manifest
    rows = [
        (label, _as_text(found[key]))
        for label, key in (
            ("Took", "took_s"),
            ("Commit", "commit"),
            ("Machine", "device"),
            ("Threads", "threads"),
        )
        if found.get(key) is not None
    ]
    for group in ("config", "versions"):
        values = found.get(group)
        if isinstance(values, Mapping):
            rows += [(f"{group}: {key}", _as_text(value)) for key, value in values.items()]
    rows = [(label, f"{value} s" if label == "Took" else value) for label, value in rows]
    return tag(
        "details",
        tag("summary", "Configuration, commit and versions"),
        tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in rows)),
    )


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
