"""The monitor shows which histories a run has, and reports breaks and reunions once."""

from __future__ import annotations

from swarm.cli.render.monitor import headline
from swarm.monitor.logic.histories import KnownLines
from swarm.monitor.prometheus import RunCollector
from tests.monitor.watched_run import WatchedRun, peer

OLD, NEW = "11" * 8, "22" * 8


def divided() -> WatchedRun:
    """Three peers are in the history without a break, one continued without them."""
    watched = WatchedRun(4, head=OLD)
    watched.present[peer(4)] = {"head": NEW, "line": NEW, "epoch": 6, "name": "laptop"}
    watched.poll(2.0)
    return watched


def test_peers_are_counted_by_history_whatever_head_they_report_for_a_moment() -> None:
    watched = divided()
    watched.present[peer(1)] = {"head": "33" * 8, "epoch": 8}
    watched.poll(2.0)
    first, second = watched.view().histories
    assert (first.head, first.line, first.epoch, first.peers) == (OLD, "", 7, 3)
    assert (second.head, second.line, second.epoch, second.peers) == (NEW, NEW, 6, 1)
    assert "2 histories: 3 in 11111111, 1 in 22222222" in headline(watched.view())
    assert watched.view().as_dict()["histories"][1] == {"head": NEW, "line": NEW, "epoch": 6, "peers": 1}
    found = {family.name: family for family in RunCollector(watched.view).collect()}
    assert [sample.value for sample in found["swarm_run_histories"].samples] == [2.0]


def test_a_run_in_one_piece_says_nothing_about_it() -> None:
    watched = WatchedRun(3, head=OLD, line=NEW)
    watched.poll(2.0)
    (only,) = watched.view().histories
    assert only.peers == 3
    assert "histories" not in headline(watched.view())
    assert not watched.events("break"), "the break was before this monitor began"
    assert WatchedRun(3).view().histories == (), "a mode without a common state"


def test_a_break_and_the_reunion_after_it_are_events() -> None:
    watched = divided()
    for _ in range(3):
        watched.poll(2.0)
    (broke,) = watched.events("break")
    assert broke.peer_id == str(peer(4))
    assert broke.text.startswith("laptop (")
    assert "without a majority" in broke.text
    assert NEW[:8] in broke.text
    watched.present[peer(4)] = {"head": OLD, "epochs_given_up": 3, "name": "laptop"}
    for _ in range(3):
        watched.poll(2.0)
    (reunited,) = watched.events("reunion")
    assert reunited.peer_id == str(peer(4))
    assert "gave up 3 epochs" in reunited.text
    assert len(watched.view().histories) == 1
    watched.present[peer(4)] = {"head": OLD}  # its process began again
    watched.poll(2.0)
    watched.present[peer(4)] = {"head": OLD, "epochs_given_up": 1}
    watched.poll(2.0)
    assert [event.text.split("gave up ")[1] for event in watched.events("reunion")] == [
        "3 epochs made without them",
        "1 epoch made without them",
    ]


def test_several_peers_that_break_together_are_one_event() -> None:
    watched = WatchedRun(6, head=OLD)
    for number in range(2, 7):
        watched.present[peer(number)] = {"head": NEW, "line": NEW}
    watched.poll(2.0)
    (broke,) = watched.events("break")
    assert " and 2 more continued" in broke.text
    assert [one.peers for one in watched.view().histories] == [5, 1]


def test_a_liar_with_many_histories_fills_neither_the_events_nor_the_view() -> None:
    watched = WatchedRun(3, head=OLD)
    for number in range(40):
        line = f"{number:016x}"
        watched.present[peer(3)] = {"head": line, "line": line, "epochs_given_up": number << 30}
        watched.poll(1.0)
    assert len(watched.events("break") + watched.events("reunion")) <= 6
    assert [one.peers for one in watched.view().histories] == [2, 1]
    lines = KnownLines()
    assert sum(lines.is_new(f"{number:x}") for number in range(3000)) == 3000
    assert not lines.is_new("")
    assert lines.is_new("0"), "the oldest are forgotten"
