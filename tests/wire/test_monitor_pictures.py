"""Pictures of the page in every state of a run, at three widths, light and dark, from a real browser.

They are written to build/pictures. The test checks what a picture would show: nothing is cut off, and charts
are drawn.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.monitor.history import ChartHistory
from swarm.monitor.logic.view import (
    HistoryView,
    LeaderView,
    LinkView,
    MonitorEvent,
    MonitorView,
    PeerView,
    RoundView,
    RunView,
)
from swarm.monitor.web import WebServer
from swarm.node import Node
from tests.wire.chromium import CHART_COLORS, needs_browser, open_browser

pytestmark = needs_browser

FOLDER = Path(__file__).parents[2] / "build" / "pictures"
WIDTHS = (360, 800, 1440)
_WAIT_S = 15.0
# elements that are wider than the window, and cells whose text is cut
_CUT = """
const wide = [...document.querySelectorAll('main *, header *, footer *')].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && !one.closest('.unseen, thead, .scroll table') && box.right > innerWidth + 1;
}).map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 40)}`);
const cut = [...document.querySelectorAll('td')]
  .filter((cell) => cell.offsetWidth && cell.scrollWidth > cell.clientWidth + 1)
  .map((cell) => cell.textContent.slice(0, 40));
const cards = [...document.querySelectorAll('section')].filter((one) => one.offsetHeight);
const over = cards.filter((one) => one.scrollHeight > one.clientHeight + 1)
  .map((one) => `too long: ${one.textContent.trim().slice(0, 40)}`);
const scrolled = [...document.querySelectorAll('.scroll')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => `to be scrolled: ${one.textContent.trim().slice(0, 40)}`);
return [...wide, ...cut, ...over, ...scrolled];
"""
RUN = RunView(
    run_id="a" * 20,
    name="bytelm",
    description="A small language model on bytes",
    task="bytelm",
    mode="gradients",
    codec="float16",
    version=3,
    target=4096,
    parameters=12_345_678,
    message="We finish on Friday. Thank you, all of you!",
)
NAMES = ("kitchen", "a workstation with a rather long name 07", "", "büro", "<b>lab</b>", "attic")


def peer(number: int, **changes: Any) -> PeerView:
    known = PeerView(
        peer_id=f"12D3KooW{number:044}",
        short=f"…{number:06}",
        state="training",
        age_s=1.0,
        fresh=True,
        name=NAMES[number % len(NAMES)],
        device="cuda (NVIDIA GeForce RTX 4090)" if number % 2 else "cpu",
        reach="direct",
        reached=True,
        agent="swarm/1.0",
        samples_per_s=120.0 * (number + 1),
        epoch=1234,
        samples_given=40_000 * (number + 1),
        loss=2.1 + number / 50,
        contributed_epoch=1233,
        contributed_ago_s=4.0,
        up_bytes=10**9 * number,
        down_bytes=2 * 10**9,
        drift=0.0,
        head="0123456789abcdef",
    )
    return replace(known, **changes)


def a_view(now_s: float) -> MonitorView:
    peers = tuple(peer(number) for number in range(6))
    kinds = [("joined", "good"), ("saved", "info"), ("saved", "info"), ("round_failed", "warning")]
    kinds += [("break", "warning"), ("reunion", "warning"), ("run", "info")]
    events = tuple(
        MonitorEvent(
            number=place, at_s=now_s - 60 * (8 - place), kind=kind, level=level, text=f"{kind} happened"
        )  # type: ignore[arg-type]
        for place, (kind, level) in enumerate(kinds, 1)
    )
    return MonitorView(
        at_s=now_s,
        run=RUN,
        link=LinkView(status="live", age_s=0.5, entry="198.51.100.1:4000", entry_answers=True, known=5),
        epoch=1234,
        samples=1500.0,
        fraction=0.37,
        eta_s=12.0,
        samples_per_s=2520.0,
        loss=2.15,
        validation_loss=2.3,
        drift=0.0,
        bytes_per_s=3e6,
        peers_live=6,
        histories=(HistoryView(head="0123456789abcdef", line="", epoch=1234, peers=6),),
        peers=peers,
        rounds=tuple(
            RoundView(
                kind="epoch",
                epoch=1234 - place,
                at_s=now_s - 12 * place,
                members=6,
                reported_by=6,
                seconds=1.25,
                bytes=5e7,
                failed=place == 2,
                failed_for=6 if place == 2 else 0,
                reason="round" if place == 2 else "",
                detail="peer 12D3KooWabc stopped answering while it reduced a shard" if place == 2 else "",
                digest="00ff" * 4,
                digests=1,
            )
            for place in range(5)
        ),
        events=events,
        leaders=tuple(
            LeaderView(
                peer_id=one.peer_id, short=one.short, name=one.name, samples=10**6 // (place + 1), rounds=900
            )
            for place, one in enumerate(peers)
        ),
        contributors=17,
        samples_given=2_600_000,
    )


def states(now_s: float) -> dict[str, MonitorView]:
    live = a_view(now_s)
    nobody = {
        "peers": (),
        "peers_live": 0,
        "samples_per_s": 0.0,
        "fraction": None,
        "eta_s": None,
        "histories": (),
    }
    paused = tuple(peer(number, state="idle", idle_s=300.0, samples_per_s=0.0) for number in range(6))
    strangers = (*live.peers, peer(9, stranger=True, name="a stranger"))
    return {
        "live": live,
        "paused": replace(live, run=replace(RUN, paused=True), peers=paused, samples_per_s=0.0),
        "planned": replace(live, run=replace(RUN, pauses=((now_s + 3600, now_s + 90000),))),
        "ended": replace(live, run=replace(RUN, ended=True), **nobody),
        "empty": replace(live, **nobody),
        "lost": replace(live, link=LinkView(status="lost", age_s=90.0, text="Trying 3 peers met before")),
        "strangers": replace(live, peers=strangers, strangers=1),
        "new": MonitorView(at_s=now_s, run=RunView(run_id="b" * 20), link=LinkView(status="live")),
    }


class StillWatch:
    """A monitor whose view the test sets."""

    def __init__(self, node: Node, shown: MonitorView) -> None:
        self.node, self.shown = node, shown
        self.history = ChartHistory(None, RUN.run_id)
        for second in range(600, 0, -2):
            self.history.add(replace(shown, at_s=shown.at_s - second, loss=2.15 + second / 500), [])

    def listen(self, on_view: Callable[[MonitorView], None]) -> None:
        pass

    def view_now(self) -> MonitorView:
        return replace(self.shown, at_s=self.node.clock.swarm_s())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("chromium"), "--hide-scrollbars", {"browser": "ALL"}) as driver:
        yield driver


def until(seen: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + _WAIT_S
    while not (found := seen()):
        assert time.monotonic() < deadline_s, f"{what} did not come within {_WAIT_S:.0f} s"
        time.sleep(0.05)
    return found


def picture(browser: Any, name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    (FOLDER / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


SAID = {
    "live": ("live", ""),
    "paused": ("paused", "The owner has paused the run"),
    "planned": ("live", "Planned pause: "),
    "ended": ("ended", "The run has ended"),
    "empty": ("nobody trains", "Nobody trains this run at the moment."),
    "lost": ("no peer answers", "No peer answers the monitor."),
    "strangers": ("live", ""),
    "new": ("nobody trains", "Nobody trains this run at the moment."),
}


def test_every_state_of_a_run_fits_phones_tablets_and_desktops_in_light_and_dark(browser: Any) -> None:
    with Node(listen=None) as node:
        watch: Any = StillWatch(node, a_view(node.clock.swarm_s()))
        with WebServer(watch, ("127.0.0.1", 0)) as server:
            for state, view in states(node.clock.swarm_s()).items():
                watch.shown = view
                browser.get(server.url)
                until(lambda: browser.execute_script("return window.swarmPage?.state.view"), "a view")
                _said(browser, state)
                for width in WIDTHS:
                    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 360}
                    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                    for theme in ("light", "dark"):
                        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
                        browser.execute_script("window.swarmPage.charts.restyle()")
                        until(lambda: not browser.execute_script(_CUT), "a page that nothing of is cut")
                        picture(browser, f"{state}-{width}-{theme}")
                        if state == "live":
                            until(lambda: _are_drawn(browser), "charts")
            _filter(browser, watch, server.url)
            complaints = [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
            assert complaints == []


def _said(browser: Any, state: str) -> None:
    status, banner = SAID[state]

    def said() -> bool:
        text = browser.execute_script("return document.getElementById('status-text').textContent")
        shown = browser.execute_script("return document.getElementById('banner').textContent")
        return bool(text.startswith(status)) and banner in shown

    until(said, f"{status!r} and {banner!r} in state {state}")


def _are_drawn(browser: Any) -> bool:
    colors = dict(browser.execute_script(CHART_COLORS))
    return all(colors.get(title, 0) >= 4 for title in ("Loss", "Peers", "Throughput", "Traffic", "Drift"))


def _filter(browser: Any, watch: Any, url: str) -> None:
    """Check the kinds of events, the marks of lineage jumps, the drift of zero and the leaderboard."""
    watch.shown = a_view(watch.node.clock.swarm_s())
    browser.get(url)
    until(
        lambda: browser.execute_script("return document.querySelectorAll('#events li').length === 7"),
        "events",
    )

    def shown() -> list[str]:
        return list(
            browser.execute_script(
                "return [...document.querySelectorAll('#events li')].filter((one) => one.offsetParent)"
                ".map((one) => one.lastElementChild.textContent)"
            )
        )

    def press(label: str) -> None:
        browser.execute_script(
            "[...document.querySelectorAll('#kinds button')]"
            f".find((one) => one.textContent === '{label}').click()"
        )

    assert "saved happened" not in shown(), "checkpoints drown nothing unless they are asked for"
    assert len(shown()) == 5
    press("checkpoints")
    assert len(shown()) == 7
    for label in ("peers", "rounds", "run", "checkpoints"):
        press(label)
    assert shown() == ["reunion happened", "break happened"]
    for label in ("peers", "rounds", "run"):
        press(label)
    marks = browser.execute_script("return window.swarmPage.charts.marks.map((one) => one.kind)")
    assert marks == ["break", "reunion"]
    until(lambda: browser.execute_script("return window.swarmPage.charts.has('drift')"), "the chart of drift")
    drift = until(
        lambda: browser.execute_script(
            "const u = window.swarmPage.charts.charts.get('drift').u;"
            "return u && [u.scales.y.min, u.scales.y.max]"
        ),
        "the scale of drift",
    )
    assert drift[0] == 0
    assert 0 < drift[1] <= 1e-6
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#leaders tbody tr')].map((row) => "
        "[...row.cells].map((cell) => cell.textContent))"
    )
    assert rows[0] == ["1", "kitchen …000000", "1,000,000", "38.5 %", "900"]
    assert rows[4][1].startswith("<b>lab</b>"), "a name is text"
    note = browser.execute_script("return document.getElementById('leaders-note').textContent")
    assert "17 peers have given something" in note
