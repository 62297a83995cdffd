"""Invites: the text contains everything, damage is detected, and no issuer can give more than it has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm.core.errors import UsageError
from swarm.core.ids import Contact
from swarm.dht.logic.blobs import run_id_of
from swarm.membership.capability import ROLES, USES_MAX, check_grants
from swarm.membership.invite import CONTACTS_MAX, Entrance, Invite, RunIdentity, Terms, is_invite, make_invite
from tests.membership.members import DAY_S, DIALED, NAME, NOW_S, InvitedRun, identity


@pytest.mark.parametrize("seed", range(20))
def test_an_invite_survives_its_text_form(seed: int) -> None:
    run = InvitedRun(seed)
    peer = identity(run.rng) if seed % 2 else None
    invite = run.invite(uses=run.rng.randint(1, USES_MAX), peer=peer)
    contacts = [Contact(identity(run.rng).peer_id, (DIALED,)) for _ in range(run.rng.randint(0, 12))]
    invite = invite.with_contacts([*contacts, Contact(run.owner.peer_id)])
    if seed % 3 == 0:
        invite = replace(invite, run=replace(invite.run, recovery=identity(run.rng).peer_id))
        run.run_id = run_id_of(run.owner.peer_id, NAME, invite.run.recovery)
    text = invite.text()
    assert is_invite(text)
    assert text.isalnum()
    assert Invite.parse(f"  {text}\n") == invite
    assert len(invite.contacts) == min(len(contacts), CONTACTS_MAX)
    assert invite.run_id == run.run_id


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_invite_is_refused_with_a_sentence(seed: int) -> None:
    run = InvitedRun(seed)
    text = run.invite().text()
    place = run.rng.randrange(len("swarm1"), len(text))
    other = run.rng.choice([one for one in "123456789ABCDEFGHJKLMNPQRSTUVWXYZ0l" if one != text[place]])
    for damaged in (text[:place], text[:place] + other + text[place + 1 :], "swarm1", "swarm1" + "z" * 9000):
        with pytest.raises(UsageError, match="invite"):
            Invite.parse(damaged)


def test_a_bearer_gets_a_valid_capability_and_the_owner_needs_none() -> None:
    run, bearer = InvitedRun(1), identity(random.Random(9))
    invite = Invite.parse(run.invite(roles=("train", "observe"), uses=3).text())
    grants = invite.capability_of(bearer.peer_id, NOW_S)
    assert check_grants(run.run_id, run.owner.peer_id, grants, NOW_S).roles == {"train", "observe"}
    assert grants[-1].subject == bearer.peer_id
    assert invite.capability_of(run.owner.peer_id, NOW_S) == ()
    with pytest.raises(UsageError, match="has expired"):
        invite.capability_of(bearer.peer_id, NOW_S + 8 * DAY_S)


def test_an_invite_for_one_peer_is_of_no_use_to_another() -> None:
    run, peer, thief = InvitedRun(2), identity(random.Random(3)), identity(random.Random(4))
    invite = run.invite(peer=peer)
    assert invite.capability_of(peer.peer_id, NOW_S) == invite.grants
    with pytest.raises(UsageError, match="this invite is for peer"):
        invite.capability_of(thief.peer_id, NOW_S)


def test_a_holder_of_the_role_invite_gives_a_part_of_what_it_has() -> None:
    run, holder, guest = InvitedRun(5), identity(random.Random(6)), identity(random.Random(7))
    held = run.invite(roles=("train", "invite"), uses=4, days=2).capability_of(holder.peer_id, NOW_S)
    further = run.invite(holder, held, roles=("train",), uses=99, days=30)
    grants = further.capability_of(guest.peer_id, NOW_S)
    standing = check_grants(run.run_id, run.owner.peer_id, grants, NOW_S)
    assert (standing.roles, grants[-1].uses, standing.expires_s) == ({"train"}, 4, int(NOW_S + 2 * DAY_S))
    with pytest.raises(UsageError, match="cannot give the role serve"):
        run.invite(holder, held, roles=("serve",))
    with pytest.raises(UsageError, match="must not invite others"):
        run.invite(guest, grants, roles=("train",))


def test_a_peer_without_a_capability_of_its_own_cannot_invite() -> None:
    run, stranger, holder = InvitedRun(8), identity(random.Random(1)), identity(random.Random(2))
    held = run.invite(peer=holder).grants
    for capability in ((), held):
        with pytest.raises(UsageError, match=r"cannot invite|belongs to"):
            run.invite(stranger, capability)


@pytest.mark.parametrize(("uses", "lifetime_s"), [(0, 1.0), (USES_MAX + 1, 1.0), (1, 0.0), (1, 1e12)])
def test_uses_and_lifetime_of_an_invite_are_bounded(uses: int, lifetime_s: float) -> None:
    run = InvitedRun(9)
    terms = Terms(roles=ROLES, uses=uses, lifetime_s=lifetime_s)
    with pytest.raises(UsageError, match="an invite"):
        make_invite(RunIdentity(run.owner.peer_id, NAME), run.owner, (), terms, now_s=NOW_S)


def test_an_entrance_takes_addresses_and_invites_to_one_run() -> None:
    run, other = InvitedRun(10), InvitedRun(11)
    invite = run.invite()
    address = Contact(other.owner.peer_id, (DIALED,))
    entrance = Entrance.of([address.multiaddrs[0], address, invite.text(), run.invite().text()])
    assert entrance.contacts == (address, address, *invite.contacts, *invite.contacts)
    assert entrance.invite == invite
    assert Entrance.of(address.multiaddrs[0]).invite is None
    with pytest.raises(UsageError, match="several runs"):
        Entrance.of([invite.text(), other.invite().text()])
    with pytest.raises(UsageError, match="names no peer"):
        Entrance.of("203.0.113.7:4000")
