"""A browser for all tests, and a page of its own look for each.

They run where MOELESS_BROWSER is set, as `make browser` does, and a Chromium is found.
"""

import os
import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import pytest  # noqa: E402 - the path to the fakes comes first

from fakes.browser import find_chromium, open_page  # noqa: E402


@pytest.fixture(scope="module")
def browser_page(tmp_path_factory):
    if not os.environ.get("MOELESS_BROWSER"):
        pytest.skip("MOELESS_BROWSER is not set; run make browser")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no chromium here; set MOELESS_CHROMIUM to a browser")
    with open_page(chromium, tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser_page):
    browser_page.errors.clear()
    browser_page.resize(1366, 768)
    browser_page.prefer("light")
    yield browser_page
    browser_page.open("about:blank")
