"""`swarm invite`: what it prints is valid, and everything that it cannot give is one sentence."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.identity import open_entry_identity
from swarm.cli.paths import default_identity, specifications_folder
from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.membership.capability import check_grants
from swarm.membership.invite import Invite
from swarm.monitor.watching import WatchConfig
from swarm.net.membership import RunMembership
from swarm.run.membership import load_capability, save_capability
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore

ADDRESS = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"
TABLE = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


@pytest.fixture
def run(home: Path) -> SignedSpecification:
    """Return a run of this user, as the machine keeps it after `swarm start`."""
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
    assert made(capsys, "--identity", str(tmp_path / "holder")).grants[-1].roles == ("train",), "its own"
    command = ["invite", "tiny", "--from", ADDRESS, "--identity", str(tmp_path / "holder"), "--role", "serve"]
    assert main(command) == 2
    sentence = "cannot give the role serve: the invite by which it joined is for train, invite"
    assert sentence in capsys.readouterr().err


def test_an_invite_that_gives_less_than_was_asked_for_says_what_it_gives(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    invite = made(capsys, "--uses", "5", "--expires", "12h", "--role", "train", "--role", "invite")
    holder = Identity.load(tmp_path / "holder")
    holder.close()
    save_capability(specifications_folder(), RunMembership(invite, holder.peer_id, (), time.time))
    command = ["invite", "tiny", "--from", ADDRESS, "--identity", str(tmp_path / "holder"), "--uses", "9"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert Invite.parse(out).grants[-1].uses == 5
    assert "this invite is for 5 peers and valid for 12.0 h" in err


def test_a_peer_that_joined_by_an_invite_with_the_role_invite_needs_no_option_to_invite(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str]
) -> None:
    invite = made(capsys, "--uses", "5", "--role", "train", "--role", "invite")
    default_identity().unlink()  # it is another user's run
    with contextlib.closing(open_entry_identity(None, [invite.text()], "train")) as holder:
        save_capability(specifications_folder(), RunMembership(invite, holder.peer_id, (), time.time))
    further = made(capsys, "--for", str(Identity.generate().peer_id))
    assert further.grants[:-1] == load_capability(specifications_folder(), run.run_id, holder.peer_id)


def test_a_damaged_identity_of_an_invite_is_moved_aside_and_another_one_is_made(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    entries = [made(capsys).text(), ADDRESS]
    with contextlib.closing(open_entry_identity(None, entries)) as first:
        file = first.path
    assert file is not None
    file.write_bytes(b"damaged")
    assert made(capsys).grants, "the owner invites, whatever other files hold"
    default_identity().unlink()
    assert main(["invite", "tiny", "--from", ADDRESS]) == 2
    assert "no identity on this machine may invite" in capsys.readouterr().err
    assert file.with_name(f"{file.name}.damaged").read_bytes() == b"damaged"
    assert "is damaged and cannot be read" in caplog.text
    file.write_bytes(b"damaged again")
    file.chmod(0o600)
    with contextlib.closing(open_entry_identity(None, entries)) as second:
        assert (second.path, second.peer_id != first.peer_id) == (file, True)


def test_commands_with_one_invite_reuse_an_identity_and_take_another_one_while_it_is_in_use(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression test: `swarm doctor`, or a first start, took the only use of an invite, and `swarm join` was
    refused.
    """
    entries = [made(capsys).text(), ADDRESS]
    one, two = open_entry_identity(None, entries, "train"), open_entry_identity(None, entries)
    assert two.peer_id != one.peer_id
    one.close()
    assert open_entry_identity(None, entries).peer_id == one.peer_id, "the first that is not in use"
    two.close()
    assert open_entry_identity(None, entries).peer_id == two.peer_id
    assert open_entry_identity(None, [made(capsys).text()]).peer_id not in (one.peer_id, two.peer_id)
    assert open_entry_identity(None, [ADDRESS]).path is None


def test_an_invite_for_one_peer_is_used_by_this_users_identity_if_that_is_the_peer(
    run: SignedSpecification, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = Identity.read(default_identity()).peer_id
    with contextlib.closing(open_entry_identity(None, [made(capsys, "--for", str(own)).text()])) as opened:
        assert opened.peer_id == own
    other = Identity.load(tmp_path / "other")
    other.close()
    text = made(capsys, "--for", str(other.peer_id)).text()
    with pytest.raises(UsageError, match=f"this invite is for peer {other.peer_id}: name the file"):
        open_entry_identity(None, [text])
    assert open_entry_identity(str(tmp_path / "other"), [text]).peer_id == other.peer_id


@pytest.mark.parametrize(
    ("command", "role"), [(["join", "--yes"], "train"), (["serve", "--experts", "ffn.[0:2]"], "serve")]
)
def test_an_invite_without_the_role_is_refused_before_it_takes_a_use(
    command: list[str], role: str, run: SignedSpecification, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression test: the peer was admitted, and refused by itself afterwards."""
    text = made(capsys, "--role", "observe").text()
    assert main([command[0], text, *command[1:]]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"swarm: this invite is for the roles observe; this needs the role {role}: ask for")
    assert not out, "no peer was opened"


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["tiny", "--from", "swarm1abc"], 2, "this invite is damaged: copy the whole word again"),
        (["tiny"], 2, "on this machine: pass the address of a peer of it"),
        (["other", "--from", ADDRESS], 2, "has no run 'other'"),
        (["tiny", "--from", ADDRESS, "--for", "me"], 2, "is not a PeerID"),
        (["tiny", "--from", ADDRESS, "--expires", "soon"], 2, "like 90s, 10m, 2h or 7d"),
        (["free", "--from", ADDRESS], 2, "is open: anybody joins it by an address"),
    ],
)
def test_an_invite_that_cannot_be_made_is_refused_in_one_sentence(
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


def test_a_dashboard_may_stay_for_a_year(
    run: SignedSpecification, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression test: the peer of the dashboard was invited for an hour, as one that makes one change."""
    seen: list[WatchConfig] = []

    def watch(config: WatchConfig, own: Identity) -> None:
        seen.append(config)
        raise UsageError("this is enough")

    monkeypatch.setattr("swarm.monitor.watching.Watch", watch)
    assert main(["dashboard", "tiny", "--from", ADDRESS]) == 2
    assert "this is enough" in capsys.readouterr().err
    (grant,) = Invite.parse(str(seen[0].entry[0])).grants
    assert (grant.roles, grant.uses) == (("observe",), 1)
    assert grant.expires_s - grant.issued_s == 365 * 86400


@pytest.mark.parametrize("raw", [b"", b"\x81", bytes(300)])
def test_a_damaged_capability_is_kept_aside_and_named(
    raw: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    holder = Identity.generate().peer_id
    file = tmp_path / f"a-{holder}.capability"
    file.write_bytes(raw)
    assert load_capability(tmp_path, "a", holder) == ()
    assert f"the capability {file} is damaged" in caplog.text
    assert file.with_name(f"{file.name}.damaged").read_bytes() == raw
    assert load_capability(tmp_path, "a", holder) == ()
    assert len(caplog.records) == 1, "it is said once"
