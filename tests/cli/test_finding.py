"""`swarm join` without an address: runs on the local network, and runs by their names."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.finding import is_run_name, nearby_entry, remembered_entry
from swarm.cli.identity import open_entry_identity
from swarm.cli.paths import default_identity, invited_identity, specifications_folder
from swarm.cli.render.output import Output, Result
from swarm.core.errors import NetworkError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.membership.invite import Entrance, Terms, make_invite
from swarm.net.logic.lan import NearbyPeer, NearbyRun
from swarm.net.membership import RunMembership
from swarm.net.peerbook import PeerBook
from swarm.run.events import Event, Notice
from swarm.run.membership import identity_of, save_capability
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore

OWNER = Identity.generate()


pytestmark = pytest.mark.usefixtures("home")


class Shown(Output):
    """Keeps the lines that a command shows, and answers its questions."""

    def __init__(self, answer: int | None = None) -> None:
        self.lines: list[str] = []
        self.answer = answer

    def emit(self, event: Event) -> None:
        assert isinstance(event, Notice | Result)
        self.lines.append(event.text)

    def choose(self, text: str, count: int) -> int | None:
        return self.answer


def kept(name: str, members: str = "open", owner: Identity = OWNER) -> SignedSpecification:
    """Return a run that this machine took part in."""
    table = {"name": name, "members": members, "target_batch_size": 64, "batch_size": 8}
    signed = sign(
        RunSpecification.from_table({**table, "task": {"name": "bytelm"}}, "test"),
        owner,
        version=1,
        created_s=0.0,
    )
    SpecificationStore(specifications_folder()).save(signed)
    return signed


def contact(number: int) -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), (Address(f"203.0.113.{number}", 4000),))


def remember(signed: SignedSpecification, *numbers: int) -> list[str]:
    """Keep peers of a run, and return their addresses, the one seen last first."""
    book = PeerBook(OWNER.peer_id, time.monotonic)
    book.keep_at(SpecificationStore(specifications_folder()).peers_file(signed.run_id))
    for number in numbers:
        book.record_connection(contact(number).peer_id, contact(number).addresses[0])
    book.save()
    return [contact(number).multiaddrs[0] for number in reversed(numbers)]


def nearby(name: str, *numbers: int, is_invited: bool = False, run_id: str = "a" * 20) -> NearbyRun:
    peers = tuple(
        NearbyPeer(contact=contact(number), run_id=run_id, run_name=name, is_invited=is_invited)
        for number in numbers
    )
    return NearbyRun(run_id=run_id, name=name, is_invited=is_invited, peers=peers)


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> list[NearbyRun]:
    """Return the list of the runs on the local network, for the test to fill."""
    found: list[NearbyRun] = []

    async def browse(*_: object) -> Sequence[NearbyRun]:
        return found

    monkeypatch.setattr("swarm.net.lan.browse", browse)
    return found


def test_names_are_told_from_addresses_and_invites() -> None:
    for name in ("bytelm", "bytelm@abcdefghij234567abcd", "abcdefghij234567abcd", "a.b-c_1"):
        assert is_run_name(name)
    for other in ("/ip4/1.2.3.4/tcp/1/p2p/x", "swarm1abc", "1.2.3.4:4000", "Name", "", "a b"):
        assert not is_run_name(other)


def test_a_run_is_joined_again_by_its_name_through_the_peers_that_were_reached() -> None:
    signed = kept("bytelm")
    addresses = remember(signed, 1, 2, 3)
    for name in ("bytelm", signed.full_name, signed.run_id):
        entry = remembered_entry(name, None, None, role="train")
        assert (list(entry.bootstrap), entry.run) == (addresses, signed.full_name)


def test_the_name_of_a_run_passes_for_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    remember(kept("bytelm"), 1)
    assert main(["join", "bytelm"]) == 2
    assert "there is no terminal to ask on" in capsys.readouterr().err


def test_a_name_that_fits_several_runs_says_which() -> None:
    first, second = kept("bytelm"), kept("bytelm", owner=Identity.generate())
    remember(first, 1)
    with pytest.raises(UsageError, match="2 runs match") as caught:
        remembered_entry("bytelm", None, None, role="train")
    assert first.full_name in str(caught.value)
    assert second.full_name in str(caught.value)
    assert remembered_entry("bytelm", first.full_name, None, role="train").run == first.full_name
    assert remembered_entry(first.run_id, None, None, role="train").run == first.full_name
    with pytest.raises(UsageError, match="--run 'other' is another run than bytelm@"):
        remembered_entry(first.run_id, "other", None, role="train")


def test_an_unknown_name_and_a_run_without_known_peers_are_reported_in_one_sentence_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    signed = kept("bytelm")
    assert main(["join", "bytelm", "--yes"]) == 2
    assert f"this machine remembers no peer of {signed.full_name}" in capsys.readouterr().err
    assert main(["join", "other", "--yes"]) == 2
    assert "this machine took part in no run 'other'" in capsys.readouterr().err


def test_an_invited_run_is_joined_again_with_the_identity_that_was_invited(tmp_path: Path) -> None:
    signed = kept("closed", "invited")
    (address,) = remember(signed, 1)
    holder = Identity.load(tmp_path / "holder", create=True)
    holder.close()
    terms = Terms(roles=("train",), uses=1, lifetime_s=3600.0)
    invite = make_invite(identity_of(signed), OWNER, (), terms, now_s=time.time())
    with pytest.raises(UsageError, match="needs an invite"):
        remembered_entry("closed", None, str(tmp_path / "holder"), role="train")
    save_capability(specifications_folder(), RunMembership(invite, holder.peer_id, (), time.time))
    for identity in (None, "new"):
        with pytest.raises(UsageError, match="needs an invite"):
            remembered_entry("closed", None, identity, role="train")
    entry = remembered_entry("closed", None, str(tmp_path / "holder"), role="train")
    entrance = Entrance.of(entry.bootstrap)
    assert entry.bootstrap[1:] == (address,)
    assert RunMembership(entrance.invite, holder.peer_id, (), time.time).run_id == signed.run_id
    with pytest.raises(UsageError, match="is for peer"):
        RunMembership(entrance.invite, Identity.generate().peer_id, (), time.time)


def test_an_invited_run_is_rejoined_with_a_stored_identity_that_is_not_in_use() -> None:
    signed = kept("closed", "invited")
    remember(signed, 1)
    terms = Terms(roles=("train",), uses=2, lifetime_s=3600.0)
    invite = make_invite(identity_of(signed), OWNER, (), terms, now_s=time.time())
    files = [invited_identity(str(invite.subject), number) for number in (1, 2)]
    for file in files:
        with closing(Identity.load(file)) as one:
            save_capability(specifications_folder(), RunMembership(invite, one.peer_id, (), time.time))
    entry = remembered_entry("closed", None, None, role="train")
    assert entry.identity == str(files[0])
    own = open_entry_identity(entry.identity, entry.bootstrap, "train")
    assert own.peer_id == Identity.read(files[0]).peer_id
    other = remembered_entry("closed", None, None, role="train").identity
    assert other is not None
    with closing(own), closing(Identity.load(other)) as second:
        assert second.peer_id == Identity.read(files[1]).peer_id
        with pytest.raises(UsageError, match=r"in use by another process.*: pass an invite"):
            remembered_entry("closed", None, None, role="train")
        with pytest.raises(UsageError, match="is using the identity file"):
            remembered_entry("closed", None, str(files[0]), role="train")


def test_an_owner_observes_its_run_by_name_while_its_own_identity_trains() -> None:
    with closing(Identity.load(default_identity())) as owner:  # held, as by `swarm start`
        signed = kept("closed", "invited", owner)
        (address,) = remember(signed, 1)
        chosen = remembered_entry("closed", None, str(default_identity()), role="observe")
        entry = remembered_entry("closed", None, None, role="observe")
        assert (entry.run, entry.bootstrap[1:]) == (signed.full_name, (address,))
        assert (entry.identity, chosen.identity) == ("new", "new")
        with closing(open_entry_identity(entry.identity, entry.bootstrap)) as watcher:
            assert watcher.peer_id != owner.peer_id
            membership = RunMembership(Entrance.of(entry.bootstrap).invite, watcher.peer_id, (), time.time)
            assert (membership.run_id, membership.invite.grants[-1].roles) == (signed.run_id, ("observe",))
        with pytest.raises(UsageError, match=r"in use by another process.*: pass an invite"):
            remembered_entry("closed", None, None, role="train")


def test_an_owner_joins_its_run_by_name_with_its_own_identity() -> None:
    with closing(Identity.load(default_identity())) as owner:
        signed = kept("closed", "invited", owner)
    (address,) = remember(signed, 1)
    entry = remembered_entry("closed", None, None, role="train")
    assert (entry.run, entry.bootstrap[1:]) == (signed.full_name, (address,))
    with closing(open_entry_identity(entry.identity, entry.bootstrap, "train")) as volunteer:
        assert volunteer.peer_id == owner.peer_id
        membership = RunMembership(Entrance.of(entry.bootstrap).invite, volunteer.peer_id, (), time.time)
        assert (membership.run_id, membership.capability) == (signed.run_id, ())
        grant = membership.invite.grants[-1]  # others join with it
        assert (set(grant.roles), grant.uses) == ({"train", "serve", "observe"}, 100)


def test_the_only_run_of_the_network_is_joined_through_its_peers(around: list[NearbyRun]) -> None:
    around.append(nearby("bytelm", 1, 2))
    shown = Shown()
    entry = nearby_entry(shown, None, None)
    assert entry.run == f"bytelm@{'a' * 20}"
    assert entry.bootstrap == (*contact(1).multiaddrs, *contact(2).multiaddrs)
    assert "1  bytelm@aaaaaaaaaaaaaaaaaaaa: 2 peers here" in shown.lines[1]
    assert shown.lines[-1] == f"joining bytelm@{'a' * 20}"


def test_of_several_runs_the_user_chooses(around: list[NearbyRun]) -> None:
    around += [nearby("one", 1), nearby("two", 2, run_id="b" * 20)]
    assert nearby_entry(Shown(answer=2), None, None).run == f"two@{'b' * 20}"
    with pytest.raises(UsageError, match="2 runs are on the local network: choose one with --run"):
        nearby_entry(Shown(), None, None)
    assert nearby_entry(Shown(), "one", None).run == f"one@{'a' * 20}"


def test_a_run_that_needs_an_invite_says_so(around: list[NearbyRun]) -> None:
    around.append(nearby("closed", 1, is_invited=True))
    shown = Shown()
    with pytest.raises(UsageError, match=r"closed@a{20} needs an invite"):
        nearby_entry(shown, None, None)
    assert shown.lines[1].endswith("; needs an invite")
    around.append(nearby("open", 2, run_id="b" * 20))
    assert nearby_entry(Shown(), None, None).run == f"open@{'b' * 20}"  # the only one that it may join


def test_an_empty_local_network_is_reported_in_one_sentence(around: list[NearbyRun]) -> None:
    with pytest.raises(NetworkError, match="no run was found on the local network"):
        nearby_entry(Shown(), None, None)


def test_json_lists_without_joining(around: list[NearbyRun], capsys: pytest.CaptureFixture[str]) -> None:
    around.append(nearby("closed", 1, is_invited=True))
    assert main(["join", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (listed,) = [line for line in lines if line["event"] == "nearby"]
    assert (listed["run"], listed["id"], listed["members"]) == ("closed", "a" * 20, "invited")
    assert listed["peers"][0]["addresses"] == contact(1).multiaddrs
