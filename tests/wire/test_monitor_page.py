"""The page in a real browser: it renders, live data arrives, charts are drawn and zoom, nobody else is asked,
and old is called old.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from swarm.core.ids import Contact
from swarm.monitor.watching import Watch, WatchConfig
from swarm.monitor.web import WebServer
from swarm.node import Node
from tests.wire.chromium import CHART_COLORS, needs_browser, open_browser
from tests.wire.watched_run import NAME, watched_run

pytestmark = needs_browser

_WAIT_S = 15.0


@pytest.fixture(scope="module")
def run() -> Iterator[list[Node]]:
    with watched_run() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(
        tmp_path_factory.mktemp("chromium"),
        "--window-size=1280,1400",
        {"browser": "ALL", "performance": "ALL"},
    ) as driver:
        yield driver


class Page:
    """Access of a test to an open page."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def js(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def text(self, identifier: str) -> str:
        return str(self.js(f"return document.getElementById('{identifier}').textContent"))

    def until(self, seen: Callable[[], Any], what: str) -> Any:
        deadline_s = time.monotonic() + _WAIT_S
        while not (found := seen()):
            assert time.monotonic() < deadline_s, (
                f"{what} did not come within {_WAIT_S:.0f} s; the page says: {self.text('status-text')}"
            )
            time.sleep(0.1)
        return found

    def points(self) -> int:
        return int(self.js("return window.swarmPage.state.at.length"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return {str(urlsplit(url).hostname) for url in urls if not url.startswith(("data:", "chrome"))}


def watch(run: list[Node], history: Path) -> Watch:
    return Watch(
        WatchConfig(entry=(Contact.parse(run[0].addresses[0]),), run=NAME, history=lambda run_id: history)
    )


def test_the_page_shows_charts_and_peers_in_a_real_browser(
    run: list[Node], browser: Any, tmp_path: Path
) -> None:
    page, history = Page(browser), tmp_path / "history.sqlite"
    with watch(run, history) as watching:
        with WebServer(watching, ("127.0.0.1", 0)) as server:
            browser.get(server.url)
            _live(page)
            _charts(page)
            _table(page)
            _relays(page)
            _phone_and_dark(page)
            kept = page.points()
            browser.refresh()
            page.until(lambda: page.text("status-text") == "live", "live data after a reload")
            assert page.until(lambda: page.points() >= kept - 1, "the history after a reload")
            assert page.complaints() == []
            assert page.hosts() == {"127.0.0.1"}
            port = int(str(urlsplit(server.url).port))
            assert not page.js("return document.getElementById('banner').textContent")
        page.until(lambda: "monitor away" in page.text("status-text"), "a word that the monitor is away")
        assert "The monitor does not answer" in page.text("banner")
    with watch(run, history) as again, WebServer(again, ("127.0.0.1", port)):
        page.until(lambda: page.text("status-text") == "live", "the monitor that was started again")
        assert page.until(lambda: page.points() > kept, "the history of before the restart")


def _live(page: Page) -> None:
    page.until(lambda: page.text("status-text") == "live", "live data")
    assert page.text("run-name") == NAME
    first = page.until(lambda: page.text("t-epoch").isdecimal() and page.text("t-epoch"), "an epoch")
    page.until(lambda: page.text("t-epoch") != first, "another epoch")
    page.until(lambda: page.text("t-held") == "1.5000", "the held-out loss")
    page.until(lambda: page.text("t-peers") == "2", "both peers")
    page.until(lambda: "One history: peers 2 in " in page.text("state-note"), "the history of both")
    page.until(lambda: page.js("return document.querySelectorAll('#events li').length") >= 2, "events")
    page.until(lambda: "agreed" in page.js("return document.getElementById('rounds').textContent"), "a round")


def _charts(page: Page) -> None:
    wanted = {"Loss", "Peers", "Throughput", "Traffic", "Rounds", "accuracy"}
    page.until(lambda: page.points() >= 3, "three points")
    page.until(
        lambda: wanted <= {title for title, colors in page.js(CHART_COLORS) if colors >= 4},
        "charts with lines, labels and grids",
    )
    labels = page.js(
        "return [...document.querySelectorAll('.plot')].map((plot) => plot.getAttribute('aria-label'))"
    )
    assert any(label.startswith("Loss: training now ") for label in labels)
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    over = page.browser.find_element("css selector", ".chart .u-over")
    ActionChains(page.browser).move_to_element(over).perform()
    page.until(lambda: page.js("return !document.querySelector('.chart .tip').hidden"), "a tooltip")
    assert "training" in page.js("return document.querySelector('.chart .tip').textContent")
    ActionChains(page.browser).move_to_element(over).click_and_hold().move_by_offset(
        90, 0
    ).release().perform()
    page.until(lambda: page.js("return !document.getElementById('unzoom').hidden"), "a zoom by dragging")
    page.js("document.getElementById('unzoom').click()")
    assert page.js("return document.getElementById('unzoom').hidden")
    plot = page.browser.find_element("css selector", ".chart .plot")
    plot.send_keys(Keys.ARROW_LEFT)
    page.until(
        lambda: page.js("return !document.querySelector('.chart .tip').hidden"), "a tooltip by keyboard"
    )
    plot.send_keys("+")
    page.until(lambda: page.js("return !document.getElementById('unzoom').hidden"), "a zoom by keyboard")
    plot.send_keys("0")
    assert page.js("return document.getElementById('unzoom').hidden")


def _table(page: Page) -> None:
    def names() -> list[str]:
        return list(
            page.js(
                "return [...document.querySelectorAll('#peers tbody button.who')]"
                ".map((one) => one.dataset.name)"
            )
        )

    assert sorted(names()) == ["anna", "ben"]
    page.js("document.querySelector('#peers th button').click()")
    assert names() == ["anna", "ben"]
    assert page.js("return document.querySelector('#peers th').getAttribute('aria-sort')") == "ascending"
    page.js("document.querySelector('#peers button.who').click()")
    assert "12D3KooW" in page.js("return document.querySelector('#peers .details').textContent")
    page.js(
        "const find = document.getElementById('filter'); find.value = 'ben'; "
        "find.dispatchEvent(new Event('input'))"
    )
    assert names() == ["ben"]
    page.js(
        "const find = document.getElementById('filter'); find.value = ''; "
        "find.dispatchEvent(new Event('input'))"
    )


def _relays(page: Page) -> None:
    assert page.js("return document.getElementById('relays-card').hidden")
    shown = page.js(
        "const relay = {peer_id: '12D3KooWrelay', short: 'relay', age_s: 4, reservations: 3, circuits: 2,"
        " carried_bytes: 9000, refused: 1234};"
        "return import('./tables.js').then((tables) => {"
        " const card = document.createElement('div'), body = document.createElement('tbody');"
        " card.hidden = true; tables.showRelays(card, body, [relay]);"
        " return [card.hidden, [...body.rows[0].cells].map((cell) => cell.textContent)]; })"
    )
    assert shown == [False, ["relay", "3", "2", "9.0 kB", "1,234", "4 s ago"]]


def _phone_and_dark(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.js("document.getElementById('theme').click()")
    assert page.js(background) != light
    page.js("document.getElementById('theme').click()")
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.until(
        lambda: page.js("return document.documentElement.scrollWidth <= 390"), "a page as wide as a phone"
    )
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
