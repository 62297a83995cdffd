"""Messages that users see when they try the commands for the first time."""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from swarm.cli.commands import swarm
from swarm.cli.identity import open_entry_identity, own_peers
from swarm.cli.options import listen_at
from swarm.cli.render.live import LiveOutput
from swarm.cli.render.monitor import ScreenState, Trends, headline, render_screen
from swarm.cli.render.volunteer import VolunteerPresentation
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.dht.logic.clock_offset import ClockOffset
from swarm.membership.invite import RunIdentity, Terms, make_invite
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.view import LinkView, MonitorView, RunView
from swarm.run import events, machine

ADDRESS = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
RUN = RunView(run_id="a" * 20, name="tiny", version=2, target=1000)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))


def said(*arguments: str) -> str:
    result = CliRunner().invoke(swarm, list(arguments))
    return f"{result.output} {result.exception}"


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        text = said("bootstrap", "--listen", place)
    assert f"cannot listen on {place}: another program has this port. Port 0 picks a free one" in text
    assert "Traceback" not in text


def test_an_address_that_was_not_copied_whole_is_recognised() -> None:
    for command in ("join", "monitor", "contributors", "runs", "experts", "doctor", "serve"):
        assert "was the address copied whole?" in said(command, ADDRESS[:-7])


def test_a_name_that_this_machine_does_not_know_is_explained_by_every_command_that_takes_one() -> None:
    for command in ("join", "monitor", "contributors", "runs", "experts", "doctor", "serve"):
        assert "this machine took part in no run 'unknown'" in said(command, "unknown", *_yes(command))


def _yes(command: str) -> list[str]:
    return ["--yes"] if command == "join" else []


def view(**changes: Any) -> MonitorView:
    plain = MonitorView(at_s=1000.0, run=RUN, link=LinkView(status="live"), epoch=7, peers_live=3)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({}, "● live", "epoch 7, 0 samples/s by 3 peers"),
        ({"peers_live": 1, "fraction": 0.3}, "● live", "epoch 7, 30 % of the next, 0 samples/s by 1 peer"),
        ({"peers_live": 0}, "○ nobody trains", "epoch 7: nobody trains this run at the moment"),
        ({"run": replace(RUN, paused=True)}, "‖ paused", "epoch 7: the owner has paused the run"),
        ({"run": replace(RUN, ended=True)}, "■ ended", "epoch 7: the run has ended"),
    ],
)
def test_the_monitor_says_paused_ended_and_empty(changes: dict[str, Any], status: str, sentence: str) -> None:
    lines = render_screen(view(**changes), ScreenState(), Trends(), 80, 24)
    assert status in lines[0].plain
    assert headline(view(**changes)) == sentence


def test_the_screen_of_the_monitor_has_the_address_of_its_page_and_the_owners_message() -> None:
    state = ScreenState(page="http://127.0.0.1:8080/")
    lines = render_screen(view(run=replace(RUN, message="Thank you!")), state, Trends(), 80, 24)
    text = "\n".join(line.plain for line in lines)
    assert "the page is at http://127.0.0.1:8080/" in text
    assert "its owner says: Thank you!" in text


def test_an_event_of_the_monitor_says_what_the_owner_changed() -> None:
    model = Model(RUN)
    model.on_run(replace(RUN, version=3, paused=True), 0.0)
    model.on_run(replace(RUN, version=4, target=2000, message="Hello"), 0.0)
    model.on_run(replace(RUN, version=5, target=2000, message="Hello"), 0.0)
    texts = [event.text for event in model.events.latest]
    assert texts == [
        "the owner changed the run: paused",
        "the owner changed the run: training continues, an epoch is 2,000 samples, a message: Hello",
        "the owner changed the run: version 5",
    ]


def test_the_time_in_which_a_person_answers_is_no_time_before_it_contributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.chain([0.0, 34.0], itertools.repeat(34.0))
    before_s = machine.process_age_s()
    with monkeypatch.context() as patched:
        patched.setattr("swarm.run.machine.time.monotonic", lambda: next(ticks))
        with machine.asking():
            pass
    assert machine.process_age_s() == pytest.approx(max(before_s - 34.0, 0.0), abs=5.0)


def test_a_volunteer_by_address_is_the_same_the_next_time_and_two_at_once_are_two() -> None:
    first = open_entry_identity(None, [ADDRESS], "train")
    second = open_entry_identity(None, [ADDRESS], "train")
    assert first.peer_id != second.peer_id
    assert own_peers() == {first.peer_id, second.peer_id}
    first.close()
    again = open_entry_identity(None, [ADDRESS], "train")
    assert again.peer_id == first.peer_id
    again.close()
    second.close()
    observer = open_entry_identity(None, [ADDRESS])
    assert observer.peer_id not in own_peers(), "who only looks needs no identity"
    new = open_entry_identity("new", [ADDRESS], "train")
    assert isinstance(new, Identity)
    assert new.peer_id not in own_peers()


def test_a_paused_volunteer_shows_why_and_no_pace() -> None:
    stream = io.StringIO()
    output = LiveOutput(VolunteerPresentation(), Console(file=stream, force_terminal=True, width=80))
    joined = {"peer_id": "12D3KooW", "run_id": "a", "join_line": "", "device": "cpu", "data": "texts"}
    output.emit(events.Joined(**joined, start_s=1.0))
    output.emit(
        events.TrainingProgress(
            epoch=3, loss=2.0, samples_per_s=135.0, swarm_samples=5, swarm_samples_per_s=300.0, peers=2
        )
    )
    output.emit(events.Paused(reason="it is outside of its hours (22:00-07:00)", member=False))
    output.close()
    *_, last = stream.getvalue().split("paused: it is outside of its hours")
    assert "samples/s" not in last
    assert "135" not in last


def test_a_wrong_clock_is_said_in_days() -> None:
    offset = ClockOffset()
    for number in range(5):
        offset.add(PeerId(bytes([number]) * 32), sent_s=0.0, received_s=0.1, peer_s=173_000.0)
    text = offset.problem(PeerId(bytes(32)), 0.1)
    assert text is not None
    assert "is 2.0 days behind its peers' clocks" in text


@pytest.mark.parametrize("arguments", [("join", ADDRESS, "--memory", "4", "--yes"), ("config", "daily=5")])
def test_a_size_without_a_unit_is_asked_for_it(arguments: tuple[str, ...]) -> None:
    """`--memory 4` meant four bytes."""
    assert "a size is written with its unit, like 4G or 800M" in said(*arguments)


def test_an_identity_is_shown_while_a_volunteer_uses_it(tmp_path: Path) -> None:
    with contextlib.closing(Identity.load(tmp_path / "identity", create=True)) as own:
        assert str(own.peer_id) in said("identity")


def test_a_command_listens_on_the_same_port_when_it_is_started_again() -> None:
    """Invites name it: with a free port each time, an invite in a mail was of no use after a restart."""
    own = Identity.generate().peer_id
    near = Contact(own, (Address("127.0.0.1", 4000),))
    first = listen_at(None, (), [near], own)
    assert first is not None
    assert first == listen_at(None, (), [near], own)
    host, _, port = first.rpartition(":")
    assert host == "127.0.0.1"
    assert 24_000 <= int(port) < 32_000
    assert listen_at(None, (), (), own) == f"0.0.0.0:{port}"
    assert listen_at("127.0.0.1:4000", (), (), own) == "127.0.0.1:4000"
    assert listen_at("none", (), (), own) is None
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        assert listen_at(None, (), [near], own) == "127.0.0.1:0"


def test_an_invite_whose_peers_do_not_answer_is_not_printed_and_says_what_to_do() -> None:
    owner = Identity.generate()
    terms = Terms(roles=("train", "observe"), uses=1, lifetime_s=3600.0)
    contact = Contact.parse(ADDRESS)
    run = RunIdentity(owner.peer_id, "bytelm", None)
    invite = make_invite(run, owner, (contact,), terms, now_s=time.time()).text()
    text = said("join", invite, "--yes")
    assert f"nobody answers at the invite {invite[:14]}…: " in text
    assert "try again later, or ask for a newer invite" in text
    assert invite[:40] not in text
