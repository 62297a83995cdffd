"""What the monitor makes of what peers tell: who is there, how old it is, and how little one liar changes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.metrics.record import Metrics
from swarm.monitor.logic.tracked import Heard
from swarm.monitor.logic.view import LinkView
from tests.monitor.telling import LIVE, Watching, claim, heard, look, peer, told


def test_sums_are_over_those_who_told_lately() -> None:
    watching = Watching(3, samples_per_s=50.0, loss=2.0)
    watching.present[peer(1)] = {"samples_per_s": 80.0, "loss": 4.0}
    watching.look(2.0)
    view = watching.view()
    assert (view.samples_per_s, view.loss, view.epoch, view.peers_live) == (180.0, 2.0, 7, 3)
    assert [one.state for one in view.peers] == ["training"] * 3


def test_what_is_old_counts_no_more_and_says_how_old_it_is() -> None:
    watching = Watching(3, samples_per_s=50.0)
    silent = heard(watching.now_s)
    watching.present.pop(peer(1))
    for _ in range(5):
        watching.now_s += 2.0
        rest = {who: heard(watching.now_s, **fields) for who, fields in watching.present.items()}
        watching.model.on_look(
            look({**rest, peer(1): Heard(metrics=silent.metrics, expires_s=watching.now_s + 60)}),
            watching.now_s,
        )
    view = watching.view()
    old = next(one for one in view.peers if one.peer_id == str(peer(1)))
    assert (old.state, old.fresh, old.samples_per_s, old.age_s) == ("quiet", False, 0.0, 10.0)
    assert (view.samples_per_s, view.peers_live, view.peers_quiet) == (100.0, 2, 1)
    assert [event.peer_id for event in watching.events("quiet")] == [str(peer(1))]
    watching.present[peer(1)] = {}
    watching.look(1.0)
    assert watching.view().peers_live == 3
    assert len(watching.events("back")) == 1


def test_who_lives_and_does_not_train_is_idle_though_its_claim_says_a_pace() -> None:
    watching = Watching(3, samples_per_s=50.0)
    watching.present[peer(1)] = {"samples_per_s": 0.0, "idle_s": 30.0}
    stuck = claim(watching.now_s, rate=50.0)
    watching.now_s += 30.0
    peers = {who: heard(watching.now_s, **fields) for who, fields in watching.present.items()}
    peers[peer(1)] = Heard(metrics=peers[peer(1)].metrics, claim=stuck, expires_s=watching.now_s + 60)
    watching.model.on_look(look(peers), watching.now_s)
    watching.now_s += 1.5
    view = watching.view()
    idle = next(one for one in view.peers if one.peer_id == str(peer(1)))
    assert (idle.state, idle.fresh, idle.samples_per_s, idle.idle_s) == ("idle", True, 0.0, 31.5)
    assert (view.samples_per_s, view.peers_live) == (100.0, 3)
    assert [one.idle_s for one in view.peers if one is not idle] == [None, None]


def test_nothing_is_called_live_when_nobody_answers() -> None:
    watching = Watching(2)
    assert watching.view().link.status == "live"
    watching.now_s += 30.0
    late = watching.view()
    assert (late.link.status, late.link.age_s, late.live) == ("late", 30.0, False)
    assert late.samples_per_s == 0.0
    assert late.eta_s is None
    watching.model.on_link(
        LinkView(status="lost", entry=LIVE.entry, entry_answers=False, known=0, text="Knocking"),
        watching.now_s,
    )
    assert watching.view().link.status == "lost"
    watching.look(1.0)
    watching.model.on_link(LIVE, watching.now_s)
    assert watching.view().link.status == "live"
    assert [event.kind for event in watching.events() if event.kind.startswith(("entry", "link"))] == [
        "entry_lost", "link_lost", "entry_back", "link_back",
    ]  # fmt: skip


def test_who_takes_its_record_back_left_and_whose_record_expired_was_lost() -> None:
    watching = Watching(4)
    watching.present.pop(peer(1))
    for _ in range(2):
        watching.look(1.0)
    assert [(event.kind, event.peer_id) for event in watching.events("left")] == [("left", str(peer(1)))]
    watching.present.pop(peer(2))
    watching.look(9.0)
    assert [event.peer_id for event in watching.events("lost")] == [str(peer(2))]
    states = {one.peer_id: one.state for one in watching.view().peers}
    assert (states[str(peer(1))], states[str(peer(2))]) == ("left", "lost")
    watching.look(200.0)
    assert len(watching.view().peers) == 2
    watching.present[peer(1)] = {}
    watching.look(1.0)
    assert watching.events("joined")[-1].peer_id == str(peer(1))


def test_one_missing_look_is_no_farewell() -> None:
    watching = Watching(2)
    fields = watching.present.pop(peer(1))
    watching.look(1.0)
    watching.present[peer(1)] = fields
    watching.look(1.0)
    assert not watching.events("left")
    assert watching.view().peers_live == 2


def test_progress_follows_the_claims_and_has_an_end_in_sight() -> None:
    watching = Watching(2, samples_per_s=50.0)
    peers = {
        who: Heard(
            metrics=heard(watching.now_s).metrics,
            claim=claim(watching.now_s, samples=200, rate=100.0),
            expires_s=watching.now_s + 15,
        )
        for who in watching.present
    }
    watching.model.on_look(look(peers), watching.now_s)
    view = watching.view()
    assert (view.samples, view.fraction, view.eta_s) == (400.0, 0.4, 3.0)
    assert watching.model.view(watching.now_s + 1).samples == 600.0


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
        "rounds": (told(1e12, epoch=1 << 40), told(0.0, members=4096, seconds=1e6, bytes=1 << 60)),
    },
]


@pytest.mark.parametrize("lie", LIES)
def test_one_liar_among_five_moves_nothing_far(lie: dict[str, Any]) -> None:
    honest = Watching(4, own={"accuracy": 0.5}, validation_loss=2.5, drift=1e-6)
    watching = Watching(4, own={"accuracy": 0.5}, validation_loss=2.5, drift=1e-6)
    watching.present[peer(9)] = lie
    for _ in range(3):
        honest.look(2.0)
        watching.look(2.0)
    true, seen = honest.view(), watching.view()
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


def test_a_liar_cannot_push_the_others_rounds_out_nor_fill_the_log() -> None:
    watching = Watching(4)
    for number in range(200):
        shared = {"rounds": (told(watching.now_s, epoch=7, group=f"{number:04x}"),)}
        for who in watching.present:
            watching.present[who] = shared
        fakes = tuple(
            told(watching.now_s, epoch=7, group=f"f{number:03x}{place}", reason="round", detail="!")
            for place in range(4)
        )
        watching.present[peer(9)] = {"rounds": fakes, "broken": ("loss",) if number % 2 else ()}
        watching.look(0.2)
    rounds = watching.view().rounds
    assert len(rounds) <= 50
    assert sum(one.told_by == 4 for one in rounds) >= 40
    assert len([event for event in watching.events() if event.peer_id == str(peer(9))]) <= 8


def test_a_liars_rounds_are_few_and_leave_what_one_honest_peer_tells() -> None:
    watching = Watching(4)
    failed = told(watching.now_s, group="", digest="", reason="deadline", detail="nobody came")
    watching.present[peer(1)] = {"rounds": (failed,)}
    for number in range(60):
        fakes = tuple(
            told(watching.now_s, epoch=7 + 1000 * (place % 2), group=f"f{number:03x}{place}")
            for place in range(4)
        )
        watching.present[peer(9)] = {"rounds": fakes}
        watching.look(0.2)
    rounds = watching.view().rounds
    assert len(rounds) <= 5
    assert {one.epoch for one in rounds} == {7}
    assert sum(one.failed for one in rounds) == 1


def test_members_words_about_a_round_become_one_row() -> None:
    watching = Watching(3)
    now_s = watching.now_s
    watching.present[peer(1)] = {"rounds": (told(now_s, seconds=1.0, bytes=100, members=3),)}
    watching.present[peer(2)] = {"rounds": (told(now_s, seconds=3.0, bytes=300, members=3),)}
    watching.present[peer(3)] = {
        "rounds": (told(now_s, seconds=2.0, bytes=200, members=3, left=((str(peer(8)), "sent nothing"),)),)
    }
    watching.look(1.0)
    (row,) = watching.view().rounds
    assert (row.members, row.told_by, row.seconds, row.bytes, row.failed, row.digests) == (
        3,
        3,
        2.0,
        600.0,
        False,
        1,
    )
    assert row.left == {str(peer(8)): "sent nothing"}


def test_failures_lies_and_differing_digests_are_events_once() -> None:
    watching = Watching(3)
    now_s = watching.now_s
    watching.present[peer(1)] = {
        "rounds": (told(now_s, group="f0", digest="", reason="deadline", detail="no group in time"),)
    }
    watching.present[peer(2)] = {
        "rounds": (told(now_s, group="11", digest="aa", accused=((str(peer(3)), "another digest"),)),)
    }
    watching.present[peer(3)] = {"rounds": (told(now_s, group="11", digest="bb"),)}
    for _ in range(4):
        watching.look(1.0)
    assert [event.text for event in watching.events("round_failed")] == [
        "a round of epoch 7 failed: no group in time"
    ]
    assert "caught lying as a reducer, by 1 peer" in watching.events("lied")[0].text
    assert len(watching.events("lied")) == len(watching.events("differs")) == 1
    assert next(one for one in watching.view().peers if one.peer_id == str(peer(3))).accused_by == 1
    watching.present[peer(1)] = {
        "rounds": (told(now_s, group="11", digest="aa", accused=((str(peer(3)), "another digest"),)),)
    }
    watching.look(1.0)
    assert "by 2 peers" in watching.events("lied")[-1].text


def test_a_loss_that_is_not_finite_is_news() -> None:
    watching = Watching(2)
    watching.present[peer(1)] = {"loss": None, "broken": ("loss",), "name": "anna"}
    for _ in range(3):
        watching.look(1.0)
    assert [event.text for event in watching.events("not_finite")] == [
        f"anna ({peer(1).short}): loss is not a finite number"
    ]


def test_the_entry_that_goes_is_told_and_the_view_stays_live() -> None:
    watching = Watching(2)
    watching.model.on_link(LinkView(entry=LIVE.entry, entry_answers=False, known=4), watching.now_s)
    view = watching.view()
    assert view.live
    assert view.link.text == "198.51.100.1:4000 does not answer: watching through 4 other peers"


def test_donors_that_agree_are_counted() -> None:
    watching = Watching(4)
    states = {peer(1): (7, "aa"), peer(2): (7, "aa"), peer(3): (7, "bb"), peer(4): (1 << 40, "zz")}
    watching.look(1.0, states=states)
    state = watching.view().state
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
def test_whatever_a_minority_tells_within_the_schema_the_median_is_an_honest_one(
    lies: list[dict[str, Any]],
) -> None:
    watching = Watching(7, loss=2.0, samples_per_s=100.0)
    liars = {
        peer(100 + place): Heard(metrics=Metrics.decode(value), expires_s=watching.now_s + 60)
        for place, value in enumerate(lies)
    }
    honest = {who: heard(watching.now_s, loss=2.0, samples_per_s=100.0) for who in watching.present}
    watching.model.on_look(look({**honest, **liars}), watching.now_s)
    view = watching.view()
    assert statistics.median([2.0] * 7) == view.loss
    assert 0 <= view.samples_per_s <= 7 * 100.0 + len(liars) * 300.0
    assert view.as_dict()
