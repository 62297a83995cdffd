"""`swarm invite`: what it prints is valid, and everything that it cannot give is one sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.paths import default_identity, specifications_folder
from swarm.core.identity import Identity
from swarm.membership.capability import check_grants
from swarm.membership.invite import Invite
from swarm.net.membership import RunMembership
from swarm.run.membership import load_capability, save_capability
from swarm.run.specification import RunSpecification, SignedSpecification, sign
from swarm.run.specification_store import SpecificationStore

ADDRESS = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"
TABLE = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SignedSpecification:
    """Return a run of this user, as the machine keeps it after `swarm start`."""
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return keep(TABLE)


def keep(table: dict[str, object]) -> SignedSpecification:
    owner = Identity.load(default_identity())
    owner.close()
    signed = sign(RunSpecification.from_table(table, "test"), owner, version=1, created_s=1.0)
    SpecificationStore(specifications_folder()).save(signed)
    return signed


def made(capsys: pytest.CaptureFixture[str], *options: str) -> Invite:
    assert main(["invite", "tiny", "--from", ADDRESS, "--json", *options]) == 0
    event = json.loads(capsys.readouterr().out)
    invite = Invite.parse(event["invite"])
    assert (event["event"], event["id"]) == ("invite", str(invite.subject))
    return invite


def test_the_owner_and_a_holder_that_may_invite_issue_valid_invites(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    invite = made(capsys, "--uses", "5", "--expires", "7d", "--role", "train", "--role", "invite")
    assert [contact.multiaddrs[0] for contact in invite.contacts] == [ADDRESS]
    holder = Identity.load(tmp_path / "holder")
    holder.close()
    membership = RunMembership(invite, holder.peer_id, (), time.time)
    save_capability(specifications_folder(), membership)
    assert load_capability(specifications_folder(), run.run_id, holder.peer_id) == membership.capability
    options = ("--identity", str(tmp_path / "holder"), "--role", "train")
    further = made(capsys, *options, "--uses", "9", "--expires", "30d")
    guest = Identity.generate().peer_id
    grants = further.capability_of(guest, time.time())
    standing = check_grants(run.run_id, run.owner, grants, time.time())
    assert (standing.roles, grants[-1].uses) == ({"train"}, 5)
    assert standing.expires_s == invite.grants[0].expires_s
    peer = made(capsys, *options, "--for", str(guest))
    assert (peer.key, peer.subject) == (b"", guest)
    assert main(["invite", "tiny", "--from", ADDRESS, "--identity", str(tmp_path / "holder")]) == 2
    assert "allows more than its issuer was allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["tiny", "--from", "swarm1abc"], 2, "this invite is damaged: copy it again"),
        (["tiny"], 2, "on this machine: pass the address of a peer of it"),
        (["other", "--from", ADDRESS], 2, "has no run 'other'"),
        (["tiny", "--from", ADDRESS, "--for", "me"], 2, "is not a PeerID"),
        (["tiny", "--from", ADDRESS, "--expires", "soon"], 2, "like 90s, 10m, 2h or 7d"),
        (["free", "--from", ADDRESS], 2, "is open: anybody joins it by an address"),
    ],
)
def test_what_cannot_be_given_is_one_sentence(
    options: list[str],
    code: int,
    sentence: str,
    run: SignedSpecification,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep({**TABLE, "name": "free", "members": "open"})
    assert main(["invite", *options]) == code
    text = capsys.readouterr().err
    assert sentence in text
    assert text.count("\n") == 1


def test_an_identity_without_a_capability_cannot_invite(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Identity.load(tmp_path / "stranger").close()
    command = ["invite", "tiny", "--from", ADDRESS, "--identity", str(tmp_path / "stranger")]
    assert main(command) == 2
    assert "this identity cannot invite" in capsys.readouterr().err
