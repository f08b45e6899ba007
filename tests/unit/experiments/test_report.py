import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from effort import PATIENCE_S
from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.manifest import describe
from moeless_experiments.report.page import REPORT_FILE, write_report
from moeless_experiments.writing import write_result

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(2)> & </title>"
EMPTY_TAGS = {"meta", "link", "img", "br"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


class Page(HTMLParser):
    """What is in a page; complains of elements that are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def draw(figure):
    figure.subplots().plot([0, 1], [0, 1])


def make(out, name, *, text="plain", provenance="simulated", plots=True, verdict="in part"):
    """Write an experiment's results, as a run does."""
    result = Result(
        provenance=provenance,
        tables=(Table(name="rows", columns=("n", text), rows=((1, 0.5), (2, text))),),
        plots=(Plot(name="line", draw=draw, caption=text),) if plots else (),
        findings=(
            Finding(
                what=f"time of {text}",
                ours="-10%",
                paper="-43%",
                why=text,
                verdict=verdict,
                cases={f"case of {text}": "-11%"},
            ),
            Finding(what="only ours", ours="7"),
        ),
        interpretation=f"First of {text}.\n\nSecond.",
        config={"devices": [1, 2], "model": text},
    )
    experiment = Experiment(id=name, title=f"Title {text}", claim=text, run=lambda _: result)
    context = Context(out=out, cache=out, seed=3)
    write_result(out / name, result, lambda: describe(experiment, result, context, took_s=1.0))


def read(out, order=()):
    return Page(write_report(out, order).read_text("utf8"))


def test_the_report_shows_everything_of_each_result_in_the_directory(tmp_path):
    make(tmp_path, "fig08", text="alpha", provenance="emulated")
    make(tmp_path, "table2", text="beta", plots=False, verdict="holds")
    page = read(tmp_path, ["table2", "fig08", "fig99"])
    for text in ("time of alpha", "time of beta", "-43%", "-10%", "only ours", "not in our copy"):
        assert text in page.text
    for text in ("by case (1)", "case of alpha: -11%"):
        assert text in page.text
    for text in ("First of alpha.", "Second.", "emulated", "seed 3", "config: devices", "1, 2"):
        assert text in page.text
    assert "Not in this directory: fig99." in page.text
    assert page.text.index("table2: Title") < page.text.index("fig08: Title")
    links = [each["href"] for each in page.all("a")]
    assert {"fig08/rows.csv", "table2/rows.csv", "#result-fig08"} <= set(links)


def test_claims_are_listed_by_whether_they_hold(tmp_path):
    make(tmp_path, "fig08", text="alpha", verdict="does not hold")
    make(tmp_path, "fig09", text="beta", verdict=None)
    text = read(tmp_path).text
    start = text.index("What holds and what does not")
    end = text.index("fig08: Title", start)
    assert "Does not hold" in text[start:end]
    assert "alpha" in text[start:end]
    assert "beta" not in text[start:end]


def test_a_row_of_the_overview_is_one_line_and_leaves_cases_and_reasons_to_the_result(tmp_path):
    make(tmp_path, "fig08", text="alpha")
    html = write_report(tmp_path, ()).read_text("utf8")
    overview = html[html.index('id="numbers"') : html.index('id="verdicts"')]
    assert 'class="line" title="time of alpha"' in overview
    assert "case of alpha" not in overview
    assert "by case" not in overview


def test_a_later_run_extends_the_report(tmp_path):
    make(tmp_path, "fig08")
    assert "fig09" not in read(tmp_path).text
    make(tmp_path, "fig09")
    ids = {each.get("id") for each in read(tmp_path).all("section")}
    assert {"result-fig08", "result-fig09"} <= ids


def test_no_text_can_become_html(tmp_path):
    make(tmp_path, "fig08", text=HOSTILE)
    (tmp_path / "fig08").rename(tmp_path / 'a"><script>x')
    page = read(tmp_path)
    assert HOSTILE in page.text
    assert page.all("script") == []
    assert not [each for _, each in page.elements if "onerror" in each]
    assert all(image["src"].startswith("data:") for image in page.all("img"))


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    make(tmp_path, "fig08")
    html = write_report(tmp_path, ()).read_text("utf8")
    page = Page(html)
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            place = attributes.get(name, "data:")
            beside = tag == "a" and (tmp_path / place).is_file()
            assert beside or place.startswith(("data:", "#"))
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert any("default-src 'none'" in each.get("content", "") for each in page.all("meta"))


def test_pictures_tables_and_sections_can_be_read_to_the_blind(tmp_path):
    make(tmp_path, "fig08")
    page = read(tmp_path)
    assert all(image["alt"].strip() for image in page.all("img"))
    assert len(page.all("caption")) == len(page.all("table"))
    ids = {each.get("id") for _, each in page.elements}
    assert all(each["aria-labelledby"] in ids for each in page.all("section"))
    assert {each["href"][1:] for each in page.all("a") if each["href"][0] == "#"} <= ids
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        '{"findings": [1]}',
        json.dumps({"tables": [{"file": "../../secret.csv", "rows": 1}]}),
        json.dumps({"plots": [{"file": "/etc/hostname.png"}]}),
    ],
)
def test_a_damaged_result_is_named_and_the_others_are_shown(tmp_path, manifest):
    make(tmp_path, "fig08")
    (tmp_path / "fig09").mkdir()
    (tmp_path / "fig09" / "manifest.json").write_text(manifest)
    page = read(tmp_path, ["fig08", "fig09"])
    assert "fig09 cannot be shown" in page.text
    assert "fig08: Title" in page.text


def test_files_that_are_gone_are_named(tmp_path):
    make(tmp_path, "fig08")
    for name in ("line.png", "line.svg", "rows.csv"):
        (tmp_path / "fig08" / name).unlink()
    text = read(tmp_path).text
    assert "line.png cannot be shown" in text
    assert "rows.csv cannot be shown" in text


def test_an_unfinished_directory_is_not_shown(tmp_path):
    make(tmp_path, "fig08")
    shutil.copytree(tmp_path / "fig08", tmp_path / ".fig09.partial")
    assert "fig09" not in read(tmp_path).text
    assert [path.name for path in tmp_path.glob("*.html")] == [REPORT_FILE]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_opens_the_report_without_errors(tmp_path):
    make(tmp_path, "fig08")
    path = write_report(tmp_path, ())
    found = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'browser'}"),
            *("--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "result-fig08" in found.stdout
    # Where something is refused or wrong, the page's console says so.
    assert ":CONSOLE" not in found.stderr
