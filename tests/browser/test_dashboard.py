"""The dashboard in headless Chromium: fresh figures, no errors, every way to look and to move."""

import os
import threading
import time
from pathlib import Path

import httpx
import pytest

from effort import PATIENCE_S
from fakes.busy_experts import BusyExperts
from fakes.live_server import serve
from fakes.text_engine import FakeTextEngine
from moeless.server import ApiKey, ServerSettings

BODY = {"model": "fake/model", "prompt": "Hi", "n": 4, "max_tokens": 20, "ignore_eos": True}
UPDATES = "Number(document.documentElement.dataset.updates ?? 0)"
TEXT = "document.getElementById({!r}).textContent"


@pytest.fixture
def serving():
    """Starts servers with experts of a shape, and requests that keep them busy."""
    stop = threading.Event()
    threads, servers = [], []

    def start(layers=30, experts=16, devices=2, **options):
        engine = FakeTextEngine()
        engine.step_s = 0.01
        server = serve(engine, live=BusyExperts(layers, experts, devices).snapshot, **options)
        running = server.__enter__()
        servers.append(server)
        headers = {"authorization": "Bearer secret"}

        def go_on():
            with httpx.Client(base_url=running.url, timeout=PATIENCE_S, headers=headers) as client:
                while not stop.is_set():
                    client.post("/v1/completions", json=BODY)

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()
        return running.url

    yield start
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    for server in servers:
        server.__exit__(None, None, None)


def keep(page, name):
    """Leave a screenshot for people where they ask for one."""
    if folder := os.environ.get("MOELESS_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(Path(folder) / f"{name}.png")


def wait_for_updates(page, more):
    page.wait_for(f"{UPDATES} >= {page.run(UPDATES) + more}")


def test_figures_come_and_change_without_an_error(page, serving):
    page.open(f"{serving()}/dashboard")
    wait_for_updates(page, 3)
    before = page.run(TEXT.format("tiles"))
    assert "30 layers × 16 experts · 2 devices" in page.run(TEXT.format("model"))
    assert page.run(TEXT.format("status")) == "live"
    wait_for_updates(page, 2)
    tiles = page.run(TEXT.format("tiles"))
    assert tiles != before
    assert "static 1.370, oracle 1" in tiles
    assert "gate" in tiles
    assert "no request yet" not in tiles
    assert page.run("document.querySelectorAll('#devices tbody tr').length") == 2
    assert "1.20 GB/s1.00 ms" in page.run(TEXT.format("devices"))
    assert "serverful" in page.run(TEXT.format("cost"))
    assert page.errors == []


def test_the_rate_of_tokens_is_shown_from_the_first_answer_on(page, serving):
    url = serving()
    live = f"{url}/moeless/live"
    page.open("about:blank")
    deadline_s = time.monotonic() + PATIENCE_S
    while not httpx.get(live).json()["requests"]["tokens_per_second"]:
        assert time.monotonic() < deadline_s
    page.open(f"{url}/dashboard")
    page.wait_for(f"{UPDATES} == 1 || {UPDATES} > 1")
    shown = "document.querySelector('#tiles dd').firstChild.textContent"
    assert float(page.run(shown).replace(",", "")) > 0
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 1")
    assert float(page.run(shown).replace(",", "")) > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [(1366, 768, False), (390, 844, True)], ids=["laptop", "phone"])
def test_it_fits_every_screen_in_both_themes(page, serving, scheme, screen):
    width, height, phone = screen
    page.resize(width, height, phone=phone)
    page.prefer(scheme)
    page.open(f"{serving()}/dashboard")
    wait_for_updates(page, 3)
    assert page.run("document.documentElement.dataset.theme") == scheme
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    # Text on its background: a contrast of 4.5 is what readers with low vision need.
    contrast = page.run(
        """(() => {
          const luminance = (colour) => {
            const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
              const value = part / 255;
              return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
          };
          const card = getComputedStyle(document.querySelector('.card')).backgroundColor;
          const texts = ['h2', '.help', 'summary', 'th', 'td', '.series b'];
          return Math.min(...texts.map((name) => {
            const colour = getComputedStyle(document.querySelector(`.card ${name}`)).color;
            const [a, b] = [luminance(colour), luminance(card)].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
          }));
        })()"""
    )
    assert contrast >= 4.5
    assert page.errors == []
    keep(page, f"{scheme}-{'phone' if phone else 'laptop'}")


def test_sixty_layers_of_a_thousand_experts_do_not_freeze_it(page, serving):
    page.open(f"{serving(60, 1000, 8)}/dashboard")
    wait_for_updates(page, 2)
    page.run(
        "window.longest = 0; new PerformanceObserver((list) => { for (const entry of "
        "list.getEntries()) longest = Math.max(longest, entry.duration); })"
        ".observe({ entryTypes: ['longtask'] }); 1"
    )
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 1")
    wait_for_updates(page, 4)
    assert page.run("longest") < 1000, "milliseconds that it did not react"
    assert page.run("document.querySelectorAll('#layers tbody tr').length") == 60
    assert page.run("document.querySelectorAll('#predicted-table tbody tr').length") == 64
    assert page.errors == []
    keep(page, "large")


def test_the_map_can_be_read_with_the_keyboard(page, serving):
    page.open(f"{serving()}/dashboard")
    wait_for_updates(page, 2)
    page.run("document.getElementById('heat').focus(); 1")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "End", "ArrowLeft", "PageDown"):
        page.press(key)
    page.wait_for(TEXT.format("heat-say") + ".startsWith('layer 12, expert 14:')")
    assert page.run("document.getElementById('layer').value") == "12"
    page.wait_for(
        "document.getElementById('predicted-help').textContent.startsWith('Bars came, m')"
    )
    for _ in range(40):
        page.press("ArrowUp")
    assert page.run(TEXT.format("heat-say")).startswith("layer 0, expert 14:")
    assert page.errors == []


def test_everything_has_a_name_and_every_chart_a_table(page, serving):
    page.open(f"{serving()}/dashboard")
    wait_for_updates(page, 2)
    nameless = page.run(
        """[...document.querySelectorAll(
             'canvas[role], [role=img], button, select, input, section')]
           .filter((each) => !(each.ariaLabel || each.getAttribute('aria-labelledby')
             || each.labels?.length || each.textContent.trim())).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    assert page.run("document.querySelectorAll('.chart[role=img]').length") == 5
    without = page.run(
        "[...document.querySelectorAll('.card:has(.chart), .card:has(canvas)')]"
        ".filter((card) => !card.querySelector('details table')).length"
    )
    assert without == 0
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; }); 1")
    wait_for_updates(page, 1)
    rows = page.run(
        "[...document.querySelectorAll('details table')].map((t) => t.tBodies[0].rows.length)"
    )
    assert min(rows) > 0


def test_the_key_is_asked_for_and_kept_for_this_tab_only(page, serving):
    settings = ServerSettings(api_keys=(ApiKey(name="a", secret="secret"),))
    page.open(f"{serving(settings=settings)}/dashboard")
    for key in ("wrong", "secret"):
        page.wait_for("document.getElementById('key-dialog').open")
        page.run(f"document.getElementById('key').value = {key!r}; 1")
        page.run("document.querySelector('#key-form button').click(); 1")
        page.wait_for("!document.getElementById('key-dialog').open")
    wait_for_updates(page, 1)
    assert page.run("sessionStorage.getItem('moeless-key')") == "secret"
    assert page.run("Object.values(localStorage).includes('secret')") is False
    assert page.run("document.body.innerHTML.includes('secret')") is False
    # The browser itself tells of the two answers that asked for a key.
    assert all("401" in error for error in page.errors)


def test_a_pause_holds_it_and_a_server_that_ends_is_told(page):
    with serve(FakeTextEngine(), live=BusyExperts(4, 8, 2).snapshot) as server:
        page.open(f"{server.url}/dashboard")
        wait_for_updates(page, 1)
        page.run("document.getElementById('pause').click(); 1")
        assert page.run(TEXT.format("status")) == "paused"
        page.run("document.getElementById('pause').click(); 1")
        wait_for_updates(page, 1)
    page.wait_for(TEXT.format("status") + ".startsWith('no answer')")


def test_the_theme_can_be_chosen_against_the_system_s(page, serving):
    page.open(f"{serving()}/dashboard")
    wait_for_updates(page, 1)
    choose = "const t = document.getElementById('theme'); t.value = {!r}; "
    page.run(choose.format("dark") + "t.dispatchEvent(new Event('change')); 1")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.run(
        "document.getElementById('theme').value = 'auto';"
        "document.getElementById('theme').dispatchEvent(new Event('change')); 1"
    )
    assert page.run("document.documentElement.dataset.theme") == "light"
    assert page.errors == []
