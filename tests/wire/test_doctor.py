"""`swarm doctor` with real peers: what it finds, and what its exit status says."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.cli import main
from swarm.core.identity import Identity
from swarm.membership.invite import RunIdentity, Terms, make_invite
from swarm.node import Node
from swarm.run.entering import enter

HERE = "127.0.0.1:0"


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["event"] == "doctor"
    found = {event["subject"]: event for event in events[:-1]}
    return {**found, "all": events[-1]}


def test_without_a_peer_only_the_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = findings(capsys)
    assert found["all"]["can_volunteer"] is True
    assert [found[name]["state"] for name in ("software", "machine", "network")] == ["good", "good", "note"]
    assert "torch" in found["software"]["text"]
    assert "GB of memory free" in found["machine"]["text"]


def test_a_machine_that_others_can_call_can_volunteer(capsys: pytest.CaptureFixture[str]) -> None:
    with Node(listen=HERE) as peer:
        assert main(["doctor", peer.addresses[0], "--json"]) == 0
    found = findings(capsys)
    assert str(peer.peer_id) in found["network"]["text"]
    assert [found[name]["state"] for name in ("network", "clock", "reach")] == ["good"] * 3
    assert found["reach"]["text"].startswith("it announces 127.0.0.1:")
    assert f"MB/s to {peer.peer_id} and " in found["speed"]["text"]
    assert found["NAT"]["text"].startswith("not known: that takes a peer that relays")


def test_a_machine_that_takes_no_calls_can_volunteer_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    with Node(listen=HERE) as peer:
        assert main(["doctor", peer.addresses[0], "--listen", "none", "--json"]) == 0
    assert findings(capsys)["reach"]["state"] == "note"


def test_only_peers_that_answer_now_are_said_to_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = ("--identity", str(tmp_path / "own"), "--json")  # its peers are remembered beside it
    with Node(listen=HERE) as peer:
        with Node(peer.addresses, listen=HERE) as other:
            assert other.wait_joined(10)
            assert main(["doctor", *peer.addresses, *other.addresses, *kept]) == 0
            assert str(other.peer_id) in findings(capsys)["network"]["text"]
        assert main(["doctor", *peer.addresses, *kept]) == 0
    said = findings(capsys)["network"]["text"]
    assert str(peer.peer_id) in said
    assert str(other.peer_id) not in said


@pytest.mark.parametrize("correction_s", [-3600.0, 3600.0])
def test_a_correction_of_the_clock_changes_no_peer_that_answers(
    correction_s: float,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression test: times before and after the correction were compared."""
    kept = ("--identity", str(tmp_path / "own"), "--json")
    with Node(listen=HERE) as peer:
        with Node(listen=HERE) as gone:
            assert main(["doctor", *gone.addresses, *kept]) == 0
        capsys.readouterr()

        def enter_and_correct(node: Node, entries: Sequence[str]) -> None:
            enter(node, entries)
            node.clock.offset_s = correction_s

        monkeypatch.setattr("swarm.cli.doctor.enter", enter_and_correct)
        assert main(["doctor", *peer.addresses, *kept]) == 0
    said = findings(capsys)["network"]["text"]
    assert str(peer.peer_id) in said
    assert str(gone.peer_id) not in said


def test_a_dead_address_is_reported_with_the_reason_and_an_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Node(listen=HERE) as gone:
        address = gone.addresses[0]
    assert main(["doctor", address, "--json"]) == 1
    found = findings(capsys)
    assert (found["all"]["can_volunteer"], found["network"]["state"]) == (False, "bad")
    assert "connection refused" in found["network"]["text"]


@pytest.mark.parametrize("invited", [True, False])
def test_an_invited_run_is_entered_with_the_invite_alone(
    capsys: pytest.CaptureFixture[str], invited: bool
) -> None:
    owner = Identity.generate()
    terms = Terms(roles=("train",), uses=5, lifetime_s=600.0)
    invite = make_invite(RunIdentity(owner.peer_id, "tiny"), owner, (), terms, now_s=time.time())
    with Node(invite.text(), listen=HERE, identity=owner) as peer:
        entry = invite.with_contacts([peer.contact]).text() if invited else peer.addresses[0]
        assert main(["doctor", entry, "--json"]) == (0 if invited else 1)
    network = findings(capsys)["network"]
    assert network["state"] == ("good" if invited else "bad")
    assert invited or "joins with an invite" in network["text"]
