"""The owner's screen: it fits the terminal, removes control characters from strangers' texts, and asks for
confirmation.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.cli.render.dashboard import Dashboard, DashboardState, Tab, render_dashboard
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.membership.invite import RunIdentity, Terms, make_invite
from swarm.monitor.logic.view import LinkView, MonitorView, PeerView, RunView
from swarm.run.issued_invites import KEPT_MAX, IssuedInvite, IssuedInvites

NOW_S = 1_000_000.0


def member(number: int, name: str) -> PeerView:
    return PeerView(
        peer_id=f"peer {number}",
        short=f"…{number:06}",
        state="training",
        age_s=1.0,
        fresh=True,
        name=name,
        samples_per_s=100.0,
    )


def dashboard(peers: int = 3, *, is_invited: bool = True, **run: object) -> Dashboard:
    about = replace(RunView(run_id="a" * 20, name="tiny"), **run)  # type: ignore[arg-type]
    view = MonitorView(
        at_s=NOW_S,
        run=about,
        link=LinkView(status="live"),
        peers=tuple(member(number, f"kitchen {number}") for number in range(peers)),
        peers_live=peers,
    )
    return Dashboard(
        view=view,
        roles={"peer 0": "owner", "peer 1": "serve, train"},
        given={"peer 1": 12_345},
        invites=[
            IssuedInvite(
                subject=f"subject {number}",
                roles=("train",),
                uses=9,
                made_s=NOW_S - 60,
                expires_s=NOW_S + 7200,
            )
            for number in range(2)
        ],
        used={"subject 1": 3},
        revoked=frozenset({"subject 0"}),
        version="7",
        is_invited=is_invited,
    )


def shown(state: DashboardState, board: Dashboard, columns: int = 100, rows: int = 24) -> str:
    lines = render_dashboard(board, state, columns, rows)
    assert len(lines) == rows
    assert all(line.cell_len <= columns for line in lines)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (60, 12), (200, 50)])
@pytest.mark.parametrize("peers", [0, 3, 200])
def test_the_screen_fits_any_terminal(columns: int, rows: int, peers: int) -> None:
    for tab in typing.get_args(Tab):
        shown(DashboardState(tab=tab, chosen=peers), dashboard(peers), columns, rows)


def test_members_have_roles_and_totals_and_invites_their_uses() -> None:
    seen = shown(DashboardState(), dashboard(message="Thank you!", paused=True))
    for text in (
        "tiny@",
        "version 7",
        "paused",
        "to volunteers: Thank you!",
        "12,345",
        "serve, train",
        "owner",
    ):
        assert text in seen
    seen = shown(DashboardState(tab="invites"), dashboard())
    assert "3 of 9" in seen
    assert "revoked" in seen
    assert "2.0 h" in seen
    assert "needs no invites" in shown(DashboardState(tab="invites"), dashboard(is_invited=False))


def test_names_of_strangers_carry_no_control_characters() -> None:
    board = dashboard(0)
    hostile = member(1, "\x1b[31mred\u202e")
    board = replace(board, view=replace(board.view, peers=(hostile,)))
    seen = shown(DashboardState(), board)
    assert "\x1b" not in seen
    assert "\u202e" not in seen
    assert "[31mred" in seen


def test_one_key_pauses_and_a_key_that_takes_something_away_is_pressed_twice() -> None:
    board, state = dashboard(), DashboardState()
    state.key("p", board)
    assert state.action == "pause"
    state.key("down", board)
    state.key("r", board)
    assert state.action is None
    assert state.notice == "press r again to revoke kitchen 1"
    state.key("end", board)  # another row: it asks again
    state.key("r", board)
    assert state.action is None
    state.key("r", board)
    assert (state.action, state.chosen_subject(board)) == ("revoke", "peer 2")
    state.key("e", board)
    assert state.notice == "press e again to end or reopen the run"
    state.key("e", board)
    assert state.action == "end"
    state.key("tab", board)
    state.key("r", board)
    assert "the invite" in state.notice
    state.key("m", board)
    assert state.action == "message"
    state.key("q", board)
    assert state.quit
    empty = DashboardState()
    empty.key("r", dashboard(0))
    assert not empty.notice


def test_invites_that_were_made_are_remembered_without_their_secret(tmp_path: Path) -> None:
    owner, issued = Identity.generate(), IssuedInvites(tmp_path / "runs", "a" * 20)
    assert issued.all() == []
    run = RunIdentity(owner.peer_id, "tiny")
    made = make_invite(run, owner, (), Terms(roles=("train",), uses=5, lifetime_s=3600.0), now_s=NOW_S)
    issued.add(made, NOW_S)
    (known,) = issued.all()
    assert PeerId.parse(known.subject) == made.subject
    assert (known.roles, known.uses, known.expires_s) == (("train",), 5, NOW_S + 3600)
    (file,) = (tmp_path / "runs").iterdir()
    assert made.key.hex() not in file.read_text()
    assert made.text() not in file.read_text()
    file.write_text('{"subject": 5}\nnothing\n[]\n' + file.read_text())
    assert issued.all() == [known]
    for _ in range(3):
        issued.add(made, NOW_S)
    assert len(issued.all()) == 4 <= KEPT_MAX
