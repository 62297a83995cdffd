"""Admission: roles, expiry, revocation and uses, the last against a model that sorts all holders."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm.core.errors import NotInvited, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.dht.logic.blobs import VERSION_MAX, Handover, handover_message
from swarm.membership.admission import Admission
from swarm.membership.capability import ROLES, Grants, roles_of
from swarm.membership.invite import Invite, RunIdentity, Terms, make_invite
from swarm.net.membership import RunMembership
from tests.membership.members import DAY_S, NAME, NOW_S, InvitedRun, identity

JOIN, STATE, REPORT, EXPERT = (
    "/swarm.Groups/Join",
    "/swarm.State/Open",
    "/swarm.Run/Report",
    "/swarm.Expert/Call",
)


def door(run: InvitedRun) -> Admission:
    return Admission(RunIdentity(run.owner.peer_id, NAME))


def admitted(admission: Admission, holder: Identity, grants: Grants, now_s: float = NOW_S) -> bool:
    try:
        admission.admit(holder.peer_id, grants, now_s)
    except NotInvited:
        return False
    return True


def test_a_stranger_is_refused_and_the_owner_is_not() -> None:
    run, stranger = InvitedRun(1), identity(random.Random(2))
    admission = door(run)
    assert "joins with an invite" in admission.refusal(stranger.peer_id, STATE, NOW_S)
    assert not admitted(admission, stranger, ())
    assert admission.refusal(run.owner.peer_id, JOIN, NOW_S) == ""
    assert admitted(admission, run.owner, ())


def test_methods_that_an_owner_called_in_one_run_take_no_place_in_another() -> None:
    """A peer chooses the names of the methods that it calls, and only 64 are remembered."""
    run, other = InvitedRun(1), InvitedRun(2)
    one, two = door(run), door(other)
    for number in range(100):
        assert not one.refusal(run.owner.peer_id, f"/swarm.Made/Up{number}", NOW_S)
    assert not two.standings[other.owner.peer_id].may_call
    assert len(one.standings[run.owner.peer_id].may_call) == 64


def test_the_capability_of_another_peer_is_of_no_use() -> None:
    run, holder, thief = InvitedRun(3), identity(random.Random(4)), identity(random.Random(5))
    admission = door(run)
    grants = run.invite().capability_of(holder.peer_id, NOW_S)
    assert not admitted(admission, thief, grants)
    assert not admitted(admission, thief, grants[:-1])
    assert admitted(admission, holder, grants)


@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        (("train",), {JOIN, STATE, REPORT, EXPERT}),
        (("serve",), {JOIN, STATE, EXPERT}),
        (("observe",), {STATE}),
        (("invite",), {STATE}),
    ],
)
def test_a_role_allows_its_methods_only(roles: tuple[str, ...], allowed: set[str]) -> None:
    run, holder = InvitedRun(6), identity(random.Random(7))
    admission = door(run)
    invite = run.invite(roles=roles_of(roles))
    admission.admit(holder.peer_id, invite.capability_of(holder.peer_id, NOW_S), NOW_S)
    for method in (JOIN, STATE, REPORT, EXPERT):
        refusal = admission.refusal(holder.peer_id, method, NOW_S)
        assert (refusal == "") == (method in allowed), refusal


@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        (("train",), {JOIN, STATE}),
        (("serve",), {JOIN, EXPERT}),
        (("observe",), set()),
        (("train", "serve"), {JOIN, STATE, EXPERT}),
    ],
    ids=["train", "serve", "observe", "both"],
)
def test_a_peer_is_called_only_for_what_its_role_offers(roles: tuple[str, ...], allowed: set[str]) -> None:
    run, holder, nobody = InvitedRun(6), identity(random.Random(7)), identity(random.Random(8))
    admission = door(run)
    invite = run.invite(roles=roles_of(roles))
    admission.admit(holder.peer_id, invite.capability_of(holder.peer_id, NOW_S), NOW_S)
    for method in (JOIN, STATE, EXPERT):
        refusal = admission.callee_refusal(holder.peer_id, method, NOW_S)
        assert (refusal == "") == (method in allowed), refusal
        assert "lacks the role" in admission.callee_refusal(nobody.peer_id, method, NOW_S)
        assert admission.callee_refusal(run.owner.peer_id, method, NOW_S) == ""
    assert admission.callee_refusal(nobody.peer_id, "/swarm.Dht/Find", NOW_S) == ""


def test_a_standing_ends_with_its_capability() -> None:
    run, holder = InvitedRun(8), identity(random.Random(9))
    admission = door(run)
    grants = run.invite(days=1).capability_of(holder.peer_id, NOW_S)
    assert admitted(admission, holder, grants)
    assert admission.refusal(holder.peer_id, STATE, NOW_S + DAY_S - 1) == ""
    assert admission.refusal(holder.peer_id, STATE, NOW_S + DAY_S) != ""
    assert not admitted(admission, holder, grants, NOW_S + DAY_S)


@pytest.mark.parametrize("revoked", ["invite", "holder", "issuer", "nobody"])
def test_a_revocation_reaches_those_that_were_admitted_through_it(revoked: str) -> None:
    run, holder, guest = InvitedRun(10), identity(random.Random(11)), identity(random.Random(12))
    admission = door(run)
    invite = run.invite(uses=5)
    held = invite.capability_of(holder.peer_id, NOW_S)
    further = run.invite(holder, held).capability_of(guest.peer_id, NOW_S)
    assert admitted(admission, holder, held)
    assert admitted(admission, guest, further)
    peers = {"invite": invite.subject, "holder": guest.peer_id, "issuer": holder.peer_id}
    admission.revoke([peers[revoked]] if revoked in peers else [run.owner.peer_id])
    guest_stays, holder_stays = revoked == "nobody", revoked in ("nobody", "holder")
    for _ in range(2):  # a second attempt changes nothing
        assert (admission.refusal(guest.peer_id, STATE, NOW_S) == "") == guest_stays
        assert (admission.refusal(holder.peer_id, STATE, NOW_S) == "") == holder_stays
        assert admitted(admission, guest, further) == guest_stays
        assert admitted(admission, holder, held) == holder_stays
    assert (admission.problem(guest.peer_id, further, NOW_S) == "") == guest_stays


@pytest.mark.parametrize("seed", range(20))
def test_peers_that_signed_first_get_the_uses_in_any_order_of_arrival(seed: int) -> None:
    run = InvitedRun(seed)
    uses = run.rng.randint(1, 4)
    invite = run.invite(uses=uses, days=1)
    bearers = [identity(run.rng) for _ in range(7)]
    signed_s = {bearer.peer_id: NOW_S + run.rng.randint(0, 5) for bearer in bearers}
    shown = {one.peer_id: invite.capability_of(one.peer_id, signed_s[one.peer_id]) for one in bearers}
    first = sorted(shown, key=lambda peer: (int(signed_s[peer]), peer))[:uses]
    for _ in range(3):
        admission = door(run)
        run.rng.shuffle(bearers)
        for bearer in bearers:
            admitted(admission, bearer, shown[bearer.peer_id], NOW_S + 9)
        stayed = {peer for peer in shown if admission.refusal(peer, STATE, NOW_S + 9) == ""}
        assert stayed == set(first)


def test_the_uses_of_a_holder_are_shared_by_all_that_it_invites() -> None:
    run, holder = InvitedRun(13), identity(random.Random(14))
    admission = door(run)
    held = run.invite(uses=3).capability_of(holder.peer_id, NOW_S)
    assert admitted(admission, holder, held)
    guests = [identity(run.rng) for _ in range(4)]
    invites = [run.invite(holder, held, uses=3) for _ in guests]
    outcome = [
        admitted(admission, guest, invite.capability_of(guest.peer_id, NOW_S + 1 + place), NOW_S + 9)
        for place, (guest, invite) in enumerate(zip(guests, invites, strict=True))
    ]
    assert outcome == [True, True, False, False]
    assert admitted(admission, guests[0], invites[0].capability_of(guests[0].peer_id, NOW_S + 60), NOW_S + 60)


class RecoveredRun:
    """A run whose founder's key is stolen, and that its recovery key has given to another owner."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.founder, self.recovery, self.owner = (identity(rng) for _ in range(3))
        self.before = RunIdentity(self.founder.peer_id, NAME, self.recovery.peer_id)
        after = VERSION_MAX
        message = handover_message(self.before.run_id, self.owner.peer_id, after)
        handover = Handover(self.founder.peer_id, self.owner.peer_id, after, self.recovery.sign(message))
        self.now = replace(self.before, handover=handover)

    def invite(self, run: RunIdentity, issuer: Identity, *, now_s: float = NOW_S) -> Invite:
        terms = Terms(roles=ROLES, uses=9, lifetime_s=9 * DAY_S)
        return make_invite(run, issuer, (), terms, now_s=now_s)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_recovery_the_new_owner_invites_and_a_thief_of_the_founders_key_does_not(seed: int) -> None:
    run, rng = RecoveredRun(seed), random.Random(seed + 100)
    early, late, guest, friend = (identity(rng) for _ in range(4))
    earlier = run.invite(run.before, run.founder)
    stolen = run.invite(run.before, run.founder, now_s=NOW_S - DAY_S)  # a thief gives it any date
    newer = run.invite(run.now, run.owner)
    admission = Admission(run.before)
    assert admitted(admission, early, earlier.capability_of(early.peer_id, NOW_S))
    assert admitted(admission, late, stolen.capability_of(late.peer_id, NOW_S))
    assert not admitted(admission, guest, newer.capability_of(guest.peer_id, NOW_S)), "not heard of yet"
    admission.follow_owner(run.now, [earlier.subject])
    assert admission.refusal(run.owner.peer_id, JOIN, NOW_S) == ""
    assert admission.refusal(early.peer_id, JOIN, NOW_S) == ""
    assert admitted(admission, guest, newer.capability_of(guest.peer_id, NOW_S))
    assert admitted(admission, friend, earlier.capability_of(friend.peer_id, NOW_S))
    assert admission.refusal(late.peer_id, JOIN, NOW_S) != ""
    assert not admitted(admission, late, stolen.capability_of(late.peer_id, NOW_S))
    assert admission.refusal(run.founder.peer_id, STATE, NOW_S) != "", "the thief has this key"
    assert not admitted(admission, run.founder, ())
    assert {late.peer_id, run.founder.peer_id} <= admission.removed


def test_a_process_that_a_new_owner_invited_admits_members_before_it_has_the_specification() -> None:
    run, rng = RecoveredRun(7), random.Random(107)
    early, guest = identity(rng), identity(rng)
    earlier = run.invite(run.before, run.founder)
    invite = Invite.parse(run.invite(run.now, run.owner).text())
    assert invite.run == run.now
    assert invite.owner == run.owner.peer_id
    admission = Admission(invite.run)
    assert admitted(admission, guest, invite.capability_of(guest.peer_id, NOW_S))
    assert admitted(admission, early, earlier.capability_of(early.peer_id, NOW_S))
    admission.follow_owner(run.now, [])
    assert admission.refusal(early.peer_id, STATE, NOW_S) != ""
    assert admission.refusal(guest.peer_id, STATE, NOW_S) == ""


def test_an_invite_whose_handover_the_recovery_key_did_not_sign_is_refused() -> None:
    run = RecoveredRun(8)
    assert run.now.handover is not None
    forged = replace(run.now.handover, signature=run.founder.sign(b"mine"))
    invite = run.invite(replace(run.now, handover=forged), run.owner)
    with pytest.raises(UsageError, match="not signed by the run's recovery key"):
        Invite.parse(invite.text())


def test_the_founder_cannot_invite_to_a_run_that_another_owner_has() -> None:
    run = RecoveredRun(9)
    with pytest.raises(UsageError, match="cannot invite"):
        run.invite(run.now, run.founder)


def membership_of(invite: Invite, own: Identity) -> RunMembership:
    return RunMembership(invite, own.peer_id, (), lambda: NOW_S)


def test_a_checked_peer_is_called_without_further_checks_until_its_rights_end() -> None:
    run, member, now_s = InvitedRun(21), identity(random.Random(22)), [NOW_S]
    identities = {"owner": run.owner, "member": member}
    terms = Terms(roles=("train",), uses=2, lifetime_s=DAY_S)
    invite = make_invite(RunIdentity(run.owner.peer_id, NAME), run.owner, (), terms, now_s=NOW_S)
    ours, theirs = (RunMembership(invite, one.peer_id, (), lambda: now_s[0]) for one in identities.values())
    assert not ours.may_call(member.peer_id, STATE), "it was not admitted"
    ours.check_reply(member.peer_id, theirs.answer(run.owner.peer_id, ours.request()))
    assert not ours.may_call(member.peer_id, STATE), "its role was not checked"
    for method in (STATE, JOIN):
        ours.check_callee(member.peer_id)
        ours.check_role(member.peer_id, method)
        assert ours.may_call(member.peer_id, method)
    with pytest.raises(NotInvited):
        ours.check_role(member.peer_id, EXPERT)
    assert not ours.may_call(member.peer_id, EXPERT)
    now_s[0] += 2 * DAY_S
    assert not ours.may_call(member.peer_id, STATE), "its invite has expired"
    now_s[0] = NOW_S
    assert ours.may_call(member.peer_id, STATE)
    ours.admission.revoke([member.peer_id])
    assert not ours.may_call(member.peer_id, STATE)


@pytest.mark.parametrize("seed", range(3))
def test_an_owner_named_by_the_recovery_key_is_admitted_before_its_specification_is_known(seed: int) -> None:
    run, rng = RecoveredRun(seed), random.Random(seed + 200)
    early, guest, thief = (identity(rng) for _ in range(3))
    member = membership_of(run.invite(run.before, run.founder), early)
    newcomer = membership_of(run.invite(run.now, run.owner), guest)
    reply = member.answer(guest.peer_id, newcomer.request())
    newcomer.check_reply(early.peer_id, reply)
    assert member.refusal(guest.peer_id, STATE) == ""
    assert member.refusal(run.owner.peer_id, JOIN) == ""
    assert member.refusal(run.founder.peer_id, JOIN) == "", "its specification has not come yet"
    third = membership_of(run.invite(run.before, run.founder), thief)
    third.answer(early.peer_id, member.request())
    assert third.admission.handover == run.now.handover, "members pass it on"


def test_a_handover_that_the_recovery_key_did_not_sign_lets_nobody_in() -> None:
    run, rng = RecoveredRun(9), random.Random(209)
    early, guest = identity(rng), identity(rng)
    member = membership_of(run.invite(run.before, run.founder), early)
    assert run.now.handover is not None
    forged = replace(run.now.handover, signature=run.founder.sign(b"mine"))
    request = membership_of(run.invite(replace(run.now, handover=forged), run.owner), guest).request()
    for raw in (request.handover, request.handover[:-1], b"\x93\x00\x00\x00", b"x" * 4096):
        request.handover = raw
        with pytest.raises(PeerError, match=r"a handover of run .* was refused"):
            member.answer(guest.peer_id, request)
    assert member.refusal(guest.peer_id, STATE) != ""


def test_an_earlier_handover_does_not_displace_a_later_one() -> None:
    run, successor = RecoveredRun(10), identity(random.Random(210))
    assert run.now.handover is not None
    message = handover_message(run.before.run_id, successor.peer_id, 2 * VERSION_MAX)
    later = Handover(run.founder.peer_id, successor.peer_id, 2 * VERSION_MAX, run.recovery.sign(message))
    admission = Admission(run.before)
    admission.hear(later)
    admission.hear(run.now.handover)
    assert admission.refusal(run.owner.peer_id, JOIN, NOW_S) != ""
    admission.follow_owner(replace(run.now, handover=later), [])
    assert admission.refusal(successor.peer_id, JOIN, NOW_S) == ""
