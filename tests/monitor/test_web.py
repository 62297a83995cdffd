"""What an open page is told: everything once, then what changed; and the files that it consists of ask nobody
else.
"""

from __future__ import annotations

import asyncio
import re
from importlib import resources

from swarm.monitor.web import Client, Told, news_for
from tests.monitor.telling import Watching, peer


def client() -> Client:
    return Client(asyncio.Event())


def test_a_page_is_told_everything_once_and_then_what_changed() -> None:
    watching, page = Watching(5), client()
    watching.look(1.0)
    first = news_for(page, Told.of(watching.view()))
    assert {row["peer_id"] for row in first["peers"]} == {str(who) for who in watching.present}
    assert first["events"]
    watching.now_s += 0.5  # time passes, and nobody tells anything
    again = news_for(page, Told.of(watching.view()))
    assert (again["peers"], again["gone"], again["events"]) == ([], [], [])
    assert again["link"]["age_s"] == 0.5
    watching.now_s -= 0.5
    watching.present[peer(1)] = {"loss": 1.25}
    watching.look(0.0)
    (changed,) = news_for(page, Told.of(watching.view()))["peers"]
    assert (changed["peer_id"], changed["loss"]) == (str(peer(1)), 1.25)
    other = news_for(client(), Told.of(watching.view()))
    assert len(other["peers"]) == 5


def test_a_page_hears_who_is_gone() -> None:
    watching, page = Watching(3), client()
    news_for(page, Told.of(watching.view()))
    watching.present.pop(peer(1))
    for _ in range(2):
        watching.look(1.0)
    watching.look(200.0)
    assert news_for(page, Told.of(watching.view()))["gone"] == [str(peer(1))]


def test_the_page_names_no_other_host() -> None:
    folder = resources.files("swarm.monitor").joinpath("static")
    for name in ("index.html", "style.css", "page.js", "charts.js", "format.js", "tables.js"):
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text), name
        assert "innerHTML" not in text.replace("this.card.innerHTML = '<header>", ""), (
            f"{name}: what strangers wrote is text, never markup"
        )
    assert "MIT" in folder.joinpath("vendor", "uPlot-LICENSE.txt").read_text(encoding="utf-8")
