"""Many identities of one stranger in a monitor: they get half of the table, a few events, and no say."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.core.standing import PeerStanding
from swarm.monitor.logic import model as module
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.tracked import PeerRecords
from tests.monitor.watched_run import LIVE, RUN, peer, peer_records, poll, report, round_report

NOW_S = 1_000_000.0
MEMBERS = [peer(number) for number in range(1, 5)]
SYBILS = [peer(number) for number in range(100, 1100)]


def watched(standing: PeerStanding | None = None) -> Model:
    standing = standing or PeerStanding()
    standing.add_members(RUN.run_id, MEMBERS)
    model = Model(RUN, standing=standing)
    model.on_link(LIVE, NOW_S)
    return model


def poll_with_liars(model: Model, now_s: float) -> None:
    lies: dict[str, Any] = {"samples_per_s": 1e6, "loss": 0.001, "epoch": 900}
    peers = {who: peer_records(now_s, samples_per_s=50.0, loss=2.0) for who in MEMBERS}
    peers |= {who: peer_records(now_s, **lies) for who in SYBILS}
    model.on_poll(poll(peers, states=dict.fromkeys(SYBILS, (900, "ab"))), now_s)


def test_the_values_of_a_thousand_strangers_are_in_no_sum() -> None:
    model = watched()
    poll_with_liars(model, NOW_S)
    view = model.view(NOW_S)
    assert (view.samples_per_s, view.loss, view.epoch, view.peers_live) == (200.0, 2.0, 7, 4)
    assert view.strangers == 1000
    assert [one.peer_id for one in view.peers[:4]] == sorted(map(str, MEMBERS))
    assert all(one.stranger for one in view.peers[4:])
    assert view.state is None or view.state.epoch == 7


def test_strangers_have_half_of_the_table_and_make_room_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PEERS_MAX", 20)
    standing = PeerStanding()
    model = watched(standing)
    strangers = {who: peer_records(NOW_S) for who in SYBILS}
    model.on_poll(poll(strangers), NOW_S)
    assert model.view(NOW_S).strangers == 10
    members = [peer(number) for number in range(1, 26)]
    standing.add_members(RUN.run_id, members)
    model.on_poll(poll(strangers | {who: peer_records(NOW_S) for who in members[:15]}), NOW_S)
    view = model.view(NOW_S)
    assert (len(view.peers), view.strangers) == (20, 5)
    assert {one.peer_id for one in view.peers if not one.stranger} == set(map(str, members[:15]))


def test_strangers_write_few_events_and_none_about_rounds() -> None:
    model = watched()
    poll_with_liars(model, NOW_S)
    for number in range(1, 30):  # within a minute, all of them come and go and report failures
        now_s = NOW_S + 2 * number
        peers = {who: peer_records(now_s) for who in MEMBERS}
        if number % 4 < 2:
            failed = round_report(now_s, reason="lies", digest="", group=f"{number:02}")
            peers |= {who: peer_records(now_s, rounds=(failed,), line=f"{number:02}") for who in SYBILS}
        model.on_poll(poll(peers), now_s)
    about_members = [one for one in model.events.latest if one.peer_id in set(map(str, MEMBERS))]
    assert 1 < len(model.events.latest) - len(about_members) <= 14  # and that a run is watched
    assert not [one for one in model.events.latest if one.kind in ("round_failed", "break", "lied")]


def test_events_of_strangers_leave_half_of_the_log_to_members() -> None:
    log = EventLog(events_max=20)
    for minute in range(100):
        log.add(61.0 * minute, "joined", "good", "a stranger", f"s{minute}", stranger=True)
        if minute < 12:
            log.add(61.0 * minute, "joined", "good", "a member", f"m{minute}")
    kept = [one.text for one in log.latest]
    assert len(kept) == 20
    assert kept.count("a member") >= 10
    assert [one.number for one in log.latest] == sorted(one.number for one in log.latest)


def test_without_known_members_all_peers_count_alike() -> None:
    model = Model(RUN)
    model.on_link(LIVE, NOW_S)
    records = {who: peer_records(NOW_S, samples_per_s=50.0) for who in SYBILS[:3]}
    records[SYBILS[3]] = PeerRecords(report=report(NOW_S), expires_s=NOW_S + 8.0)
    model.on_poll(poll(records), NOW_S)
    assert (model.view(NOW_S).peers_live, model.view(NOW_S).strangers) == (4, 0)
