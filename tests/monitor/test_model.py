"""The model of the monitor: which peers take part, the age of their values, and the limited influence of one
liar.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.metrics.record import Metrics
from swarm.monitor.logic.tracked import PeerRecords
from swarm.monitor.logic.view import LinkView
from tests.monitor.watched_run import LIVE, WatchedRun, peer, peer_records, poll, report, round_report


def test_sums_include_only_peers_with_fresh_records() -> None:
    watched = WatchedRun(3, samples_per_s=50.0, loss=2.0)
    watched.present[peer(1)] = {"samples_per_s": 80.0, "loss": 4.0}
    watched.poll(2.0)
    view = watched.view()
    assert (view.samples_per_s, view.loss, view.epoch, view.peers_live) == (180.0, 2.0, 7, 3)
    assert [one.state for one in view.peers] == ["training"] * 3


def test_old_values_are_not_counted_and_show_their_age() -> None:
    watched = WatchedRun(3, samples_per_s=50.0)
    silent = peer_records(watched.now_s)
    watched.present.pop(peer(1))
    for _ in range(5):
        watched.now_s += 2.0
        rest = {who: peer_records(watched.now_s, **fields) for who, fields in watched.present.items()}
        watched.model.on_poll(
            poll({**rest, peer(1): PeerRecords(metrics=silent.metrics, expires_s=watched.now_s + 60)}),
            watched.now_s,
        )
    view = watched.view()
    old = next(one for one in view.peers if one.peer_id == str(peer(1)))
    assert (old.state, old.fresh, old.samples_per_s, old.age_s) == ("quiet", False, 0.0, 10.0)
    assert (view.samples_per_s, view.peers_live, view.peers_quiet) == (100.0, 2, 1)
    assert [event.peer_id for event in watched.events("quiet")] == [str(peer(1))]
    watched.present[peer(1)] = {}
    watched.poll(1.0)
    assert watched.view().peers_live == 3
    assert len(watched.events("back")) == 1


def test_a_peer_that_does_not_train_is_idle_whatever_rate_it_reports() -> None:
    watched = WatchedRun(3, samples_per_s=50.0)
    watched.present[peer(1)] = {"samples_per_s": 0.0, "idle_s": 30.0}
    stuck = report(watched.now_s, rate=50.0)
    watched.now_s += 30.0
    peers = {who: peer_records(watched.now_s, **fields) for who, fields in watched.present.items()}
    peers[peer(1)] = PeerRecords(metrics=peers[peer(1)].metrics, report=stuck, expires_s=watched.now_s + 60)
    watched.model.on_poll(poll(peers), watched.now_s)
    watched.now_s += 1.5
    view = watched.view()
    idle = next(one for one in view.peers if one.peer_id == str(peer(1)))
    assert (idle.state, idle.fresh, idle.samples_per_s, idle.idle_s) == ("idle", True, 0.0, 31.5)
    assert (view.samples_per_s, view.peers_live) == (100.0, 3)
    assert [one.idle_s for one in view.peers if one is not idle] == [None, None]


def test_the_view_is_not_live_when_no_peer_answers() -> None:
    watched = WatchedRun(2)
    assert watched.view().link.status == "live"
    watched.now_s += 30.0
    late = watched.view()
    assert (late.link.status, late.link.age_s, late.live) == ("late", 30.0, False)
    assert late.samples_per_s == 0.0
    assert late.eta_s is None
    watched.model.on_link(
        LinkView(
            status="lost", entry=LIVE.entry, entry_answers=False, known=0, text="Trying 3 peers met before"
        ),
        watched.now_s,
    )
    assert watched.view().link.status == "lost"
    watched.poll(1.0)
    watched.model.on_link(LIVE, watched.now_s)
    assert watched.view().link.status == "live"
    assert [event.kind for event in watched.events() if event.kind.startswith(("entry", "link"))] == [
        "entry_lost", "link_lost", "entry_back", "link_back",
    ]  # fmt: skip


def test_a_peer_that_withdrew_its_record_left_and_one_whose_record_expired_was_lost() -> None:
    watched = WatchedRun(4)
    watched.present.pop(peer(1))
    for _ in range(2):
        watched.poll(1.0)
    assert [(event.kind, event.peer_id) for event in watched.events("left")] == [("left", str(peer(1)))]
    watched.present.pop(peer(2))
    watched.poll(9.0)
    assert [event.peer_id for event in watched.events("lost")] == [str(peer(2))]
    states = {one.peer_id: one.state for one in watched.view().peers}
    assert (states[str(peer(1))], states[str(peer(2))]) == ("left", "lost")
    watched.poll(200.0)
    assert len(watched.view().peers) == 2
    watched.present[peer(1)] = {}
    watched.poll(1.0)
    assert watched.events("joined")[-1].peer_id == str(peer(1))


def test_a_peer_missing_in_one_poll_has_not_left() -> None:
    watched = WatchedRun(2)
    fields = watched.present.pop(peer(1))
    watched.poll(1.0)
    watched.present[peer(1)] = fields
    watched.poll(1.0)
    assert not watched.events("left")
    assert watched.view().peers_live == 2


def test_progress_and_eta_follow_the_reports() -> None:
    watched = WatchedRun(2, samples_per_s=50.0)
    peers = {
        who: PeerRecords(
            metrics=peer_records(watched.now_s).metrics,
            report=report(watched.now_s, samples=200, rate=100.0),
            expires_s=watched.now_s + 15,
        )
        for who in watched.present
    }
    watched.model.on_poll(poll(peers), watched.now_s)
    view = watched.view()
    assert (view.samples, view.fraction, view.eta_s) == (400.0, 0.4, 3.0)
    assert watched.model.view(watched.now_s + 1).samples == 600.0


LIES: list[dict[str, Any]] = [
    {
        "samples_per_s": 1e12,
        "loss": 1e30,
        "epoch": 1 << 40,
        "validation_loss": -1e30,
        "drift": 1e12,
        "bytes_up": 1 << 60,
    },
    {
        "samples_per_s": 0.0,
        "loss": -1e30,
        "epoch": 0,
        "own": {"accuracy": 1e300, **{f"x{n}": 1.0 for n in range(15)}},
    },
    {
        "name": "x" * 40,
        "rounds": (
            round_report(1e12, epoch=1 << 40),
            round_report(0.0, members=4096, seconds=1e6, bytes=1 << 60),
        ),
    },
]


@pytest.mark.parametrize("lie", LIES)
def test_one_liar_among_five_changes_sums_little(lie: dict[str, Any]) -> None:
    honest = WatchedRun(4, own={"accuracy": 0.5}, validation_loss=2.5, drift=1e-6)
    watched = WatchedRun(4, own={"accuracy": 0.5}, validation_loss=2.5, drift=1e-6)
    watched.present[peer(9)] = lie
    for _ in range(3):
        honest.poll(2.0)
        watched.poll(2.0)
    true, seen = honest.view(), watched.view()
    assert seen.samples_per_s <= true.samples_per_s + 3 * 100.0
    assert (seen.loss, seen.validation_loss, seen.drift, seen.epoch) == (
        true.loss,
        true.validation_loss,
        true.drift,
        true.epoch,
    )
    assert seen.own["accuracy"].median == 0.5
    assert len(seen.own) <= 24
    assert seen.bytes_per_s == 0.0
    assert [one for one in seen.rounds if one.epoch > 10] == []


def test_a_liar_can_neither_displace_the_rounds_of_others_nor_fill_the_log() -> None:
    watched = WatchedRun(4)
    for number in range(200):
        shared = {"rounds": (round_report(watched.now_s, epoch=7, group=f"{number:04x}"),)}
        for who in watched.present:
            watched.present[who] = shared
        fakes = tuple(
            round_report(watched.now_s, epoch=7, group=f"f{number:03x}{place}", reason="round", detail="!")
            for place in range(4)
        )
        watched.present[peer(9)] = {"rounds": fakes, "broken": ("loss",) if number % 2 else ()}
        watched.poll(0.2)
    rounds = watched.view().rounds
    assert len(rounds) <= 50
    assert sum(one.reported_by == 4 for one in rounds) >= 40
    assert len([event for event in watched.events() if event.peer_id == str(peer(9))]) <= 8


def test_rounds_of_a_liar_are_limited_and_keep_those_of_one_honest_peer() -> None:
    watched = WatchedRun(4)
    failed = round_report(watched.now_s, group="", digest="", reason="deadline", detail="nobody came")
    watched.present[peer(1)] = {"rounds": (failed,)}
    for number in range(60):
        fakes = tuple(
            round_report(watched.now_s, epoch=7 + 1000 * (place % 2), group=f"f{number:03x}{place}")
            for place in range(4)
        )
        watched.present[peer(9)] = {"rounds": fakes}
        watched.poll(0.2)
    rounds = watched.view().rounds
    assert len(rounds) <= 5
    assert {one.epoch for one in rounds} == {7}
    assert sum(one.failed for one in rounds) == 1


def test_reports_of_the_members_of_a_round_become_one_row() -> None:
    watched = WatchedRun(3)
    now_s = watched.now_s
    watched.present[peer(1)] = {"rounds": (round_report(now_s, seconds=1.0, bytes=100, members=3),)}
    watched.present[peer(2)] = {"rounds": (round_report(now_s, seconds=3.0, bytes=300, members=3),)}
    watched.present[peer(3)] = {
        "rounds": (
            round_report(now_s, seconds=2.0, bytes=200, members=3, left=((str(peer(8)), "sent nothing"),)),
        )
    }
    watched.poll(1.0)
    (row,) = watched.view().rounds
    assert (row.members, row.reported_by, row.seconds, row.bytes, row.failed, row.digests) == (
        3,
        3,
        2.0,
        600.0,
        False,
        1,
    )
    assert row.left == {str(peer(8)): "sent nothing"}


def test_failures_lies_and_differing_digests_become_one_event_each() -> None:
    watched = WatchedRun(3)
    now_s = watched.now_s
    watched.present[peer(1)] = {
        "rounds": (round_report(now_s, group="f0", digest="", reason="deadline", detail="no group in time"),)
    }
    watched.present[peer(2)] = {
        "rounds": (round_report(now_s, group="11", digest="aa", accused=((str(peer(3)), "another digest"),)),)
    }
    watched.present[peer(3)] = {"rounds": (round_report(now_s, group="11", digest="bb"),)}
    for _ in range(4):
        watched.poll(1.0)
    assert [event.text for event in watched.events("round_failed")] == [
        "a round of epoch 7 failed: no group in time"
    ]
    assert "caught lying as a reducer, by 1 peer" in watched.events("lied")[0].text
    assert len(watched.events("lied")) == len(watched.events("differs")) == 1
    assert next(one for one in watched.view().peers if one.peer_id == str(peer(3))).accused_by == 1
    watched.present[peer(1)] = {
        "rounds": (round_report(now_s, group="11", digest="aa", accused=((str(peer(3)), "another digest"),)),)
    }
    watched.poll(1.0)
    assert "by 2 peers" in watched.events("lied")[-1].text


def test_a_loss_that_is_not_finite_becomes_an_event() -> None:
    watched = WatchedRun(2)
    watched.present[peer(1)] = {"loss": None, "broken": ("loss",), "name": "anna"}
    for _ in range(3):
        watched.poll(1.0)
    assert [event.text for event in watched.events("not_finite")] == [
        f"anna ({peer(1).short}): loss is not a finite number"
    ]


def test_a_lost_entry_peer_becomes_an_event_and_the_view_stays_live() -> None:
    watched = WatchedRun(2)
    watched.model.on_link(LinkView(entry=LIVE.entry, entry_answers=False, known=4), watched.now_s)
    view = watched.view()
    assert view.live
    assert view.link.text == "198.51.100.1:4000 does not answer: watching through 4 other peers"


def test_donors_that_agree_are_counted() -> None:
    watched = WatchedRun(4)
    states = {peer(1): (7, "aa"), peer(2): (7, "aa"), peer(3): (7, "bb"), peer(4): (1 << 40, "zz")}
    watched.poll(1.0, states=states)
    state = watched.view().state
    assert state is not None
    assert (state.epoch, state.digest, state.donors, state.others) == (7, "aa", 2, 1)


_TOLD = st.fixed_dictionaries(
    {
        "at": st.floats(0, 1e12),
        "since": st.floats(0, 1e12),
        "every": st.floats(0.1, 600.0),
        "epoch": st.integers(0, 1 << 40),
        "rate": st.floats(0, 1e12),
        "loss": st.floats(-1e30, 1e30),
        "drift": st.floats(0, 1e12),
        "up": st.integers(0, 1 << 60),
    }
)


@given(st.lists(_TOLD, min_size=1, max_size=3))
def test_the_median_is_an_honest_value_whatever_a_minority_publishes(
    lies: list[dict[str, Any]],
) -> None:
    watched = WatchedRun(7, loss=2.0, samples_per_s=100.0)
    liars = {
        peer(100 + place): PeerRecords(metrics=Metrics.decode(value), expires_s=watched.now_s + 60)
        for place, value in enumerate(lies)
    }
    honest = {who: peer_records(watched.now_s, loss=2.0, samples_per_s=100.0) for who in watched.present}
    watched.model.on_poll(poll({**honest, **liars}), watched.now_s)
    view = watched.view()
    assert statistics.median([2.0] * 7) == view.loss
    assert 0 <= view.samples_per_s <= 7 * 100.0 + len(liars) * 300.0
    assert view.as_dict()


@pytest.mark.parametrize("which", [(0, 1), (0, 20), (3, 1), (3, 10)])
def test_a_round_that_failed_is_one_event_however_often_it_is_reported(which: tuple[int, int]) -> None:
    """Before, more than 50 reported rounds displaced one another and seemed new with every poll: one failed
    round was an event each second, or none.
    """
    watched = WatchedRun(20)
    start_s = watched.now_s
    for _ in range(35):
        for number in range(1, 21):
            watched.present[peer(number)]["rounds"] = tuple(
                round_report(
                    start_s - back,
                    epoch=7 - back,
                    group=f"{number:02x}{back:02x}",
                    reason="round" if (back, number) == which else "",
                )
                for back in range(4)
            )
        watched.poll(1.0)
    assert len(watched.events("round_failed")) == 1
    assert len(watched.view().rounds) == 50
