"""Updates of an open page: everything once, then changes only; its files load nothing from other hosts."""

from __future__ import annotations

import asyncio
import re
from importlib import resources

from swarm.monitor.web import Client, PageState, update_for
from tests.monitor.watched_run import WatchedRun, peer


def client() -> Client:
    return Client(asyncio.Event())


def test_a_page_receives_everything_once_and_then_changes() -> None:
    watched, page = WatchedRun(5), client()
    watched.poll(1.0)
    first = update_for(page, PageState.of(watched.view()))
    assert {row["peer_id"] for row in first["peers"]} == {str(who) for who in watched.present}
    assert first["events"]
    watched.now_s += 0.5  # time passes, and no peer publishes anything
    again = update_for(page, PageState.of(watched.view()))
    assert (again["peers"], again["gone"], again["events"]) == ([], [], [])
    assert again["link"]["age_s"] == 0.5
    watched.now_s -= 0.5
    watched.present[peer(1)] = {"loss": 1.25}
    watched.poll(0.0)
    (changed,) = update_for(page, PageState.of(watched.view()))["peers"]
    assert (changed["peer_id"], changed["loss"]) == (str(peer(1)), 1.25)
    other = update_for(client(), PageState.of(watched.view()))
    assert len(other["peers"]) == 5


def test_a_page_receives_the_peers_that_are_gone() -> None:
    watched, page = WatchedRun(3), client()
    update_for(page, PageState.of(watched.view()))
    watched.present.pop(peer(1))
    for _ in range(2):
        watched.poll(1.0)
    watched.poll(200.0)
    assert update_for(page, PageState.of(watched.view()))["gone"] == [str(peer(1))]


def test_the_page_refers_to_no_other_host() -> None:
    folder = resources.files("swarm.monitor").joinpath("static")
    for name in ("index.html", "style.css", "page.js", "charts.js", "format.js", "tables.js"):
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text), name
        assert "innerHTML" not in text.replace("this.card.innerHTML = '<header>", ""), (
            f"{name}: what strangers wrote is text, never markup"
        )
    assert "MIT" in folder.joinpath("vendor", "uPlot-LICENSE.txt").read_text(encoding="utf-8")
