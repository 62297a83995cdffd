"""Capabilities: a chain of grants is valid exactly when nothing in it exceeds what its issuer was allowed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm.core.errors import NotInvited, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.membership.capability import (
    INVITES_MAX,
    ROLES,
    USES_MAX,
    Grant,
    Grants,
    bear,
    check_grants,
    decode,
    encode,
    issue,
    roles_of,
)
from tests.membership.members import DAY_S, NOW_S, InvitedRun, identity


def chain(run: InvitedRun, rng: random.Random, wrong: str | None) -> tuple[Grants, Identity]:
    """Return a chain of random grants and its holder. With `wrong`, one grant exceeds the previous one in
    this respect, and everything else is valid.
    """
    issuer, roles, uses, expires_s = run.owner, ROLES, 50, int(NOW_S + 9 * DAY_S)
    grants: list[Grant] = []
    invites = rng.randint(1, INVITES_MAX) if wrong is None else rng.randint(2, INVITES_MAX)
    spoilt = rng.randrange(1, invites) if wrong is not None else -1
    for number in range(invites):
        if number:
            roles = tuple(role for role in roles if role == "invite" or rng.random() < 0.9)
            uses, expires_s = rng.randint(1, uses), expires_s - rng.randint(0, 3600)
        if not roles:
            roles = ("invite",)
        key = identity(rng) if rng.random() < 0.7 else None
        bearer = identity(rng)
        grant = Grant(
            kind="invite" if key else "peer",
            subject=key.peer_id if key else bearer.peer_id,
            roles=roles,
            uses=uses,
            issued_s=int(NOW_S),
            expires_s=expires_s,
        )
        if number == spoilt:
            before = grants[-1]
            if wrong == "uses":
                grant = replace(grant, uses=before.uses + 1)
            elif wrong == "expiry":
                grant = replace(grant, expires_s=before.expires_s + 1)
            elif wrong == "roles":
                grant = replace(grant, roles=ROLES)
        elif number == spoilt - 1 and wrong == "roles":
            grant = replace(grant, roles=("observe", "invite"))
        signer = identity(rng) if wrong == "signature" and number == spoilt else issuer
        grants.append(issue(run.run_id, signer, grant))
        if key:
            grants = list(bear(run.run_id, tuple(grants), key, bearer.peer_id, NOW_S))
        issuer = bearer
    return tuple(grants), issuer


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_that_never_exceeds_its_issuer_is_valid(seed: int) -> None:
    run = InvitedRun(seed)
    grants, holder = chain(run, run.rng, None)
    standing = check_grants(run.run_id, run.owner.peer_id, decode(encode(grants)), NOW_S)
    assert grants[-1].subject == holder.peer_id
    assert standing.roles == set.intersection(*(set(grant.roles) for grant in grants))
    assert standing.expires_s == min(grant.expires_s for grant in grants)


@pytest.mark.parametrize("wrong", ["uses", "expiry", "roles", "signature"])
@pytest.mark.parametrize("seed", range(10))
def test_a_chain_that_exceeds_its_issuer_in_one_respect_is_refused(seed: int, wrong: str) -> None:
    run = InvitedRun(seed)
    grants, _ = chain(run, run.rng, wrong)
    reason = "was not signed" if wrong == "signature" else "allows more than its issuer"
    with pytest.raises(NotInvited, match=reason):
        check_grants(run.run_id, run.owner.peer_id, grants, NOW_S)


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_with_one_changed_byte_is_refused(seed: int) -> None:
    run = InvitedRun(seed)
    grants, _ = chain(run, run.rng, None)
    raw = bytearray(encode(grants))
    raw[run.rng.randrange(len(raw))] ^= run.rng.randint(1, 255)
    with pytest.raises(PeerError):
        check_grants(run.run_id, run.owner.peer_id, decode(bytes(raw)), NOW_S)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_refused_as_a_capability(seed: int) -> None:
    rng = random.Random(seed)
    with pytest.raises(PeerError, match="cannot be decoded"):
        decode(rng.randbytes(rng.randint(1, 3000)))


def test_a_capability_of_another_run_or_owner_is_refused() -> None:
    run, other = InvitedRun(1), InvitedRun(2)
    grants, _ = chain(run, run.rng, None)
    for run_id, owner in ((other.run_id, run.owner), (run.run_id, other.owner)):
        with pytest.raises(NotInvited, match="not signed by the run's owner"):
            check_grants(run_id, owner.peer_id, grants, NOW_S)


def test_a_chain_of_four_invites_is_refused_and_three_are_not() -> None:
    run = InvitedRun(3)
    issuer, grants = run.owner, Grants()
    for number in range(4):
        peer = identity(run.rng)
        grant = Grant(
            kind="peer",
            subject=peer.peer_id,
            roles=ROLES,
            uses=9,
            issued_s=int(NOW_S),
            expires_s=int(NOW_S + 9),
        )
        issuer, grants = peer, (*grants, issue(run.run_id, issuer, grant))
        if number < 3:
            check_grants(run.run_id, run.owner.peer_id, grants, NOW_S)
    with pytest.raises(NotInvited, match="at most 3 invites"):
        check_grants(run.run_id, run.owner.peer_id, grants, NOW_S)


def test_a_peer_without_the_role_invite_and_the_key_of_an_invite_cannot_issue_invites() -> None:
    run, peer, key = InvitedRun(4), identity(random.Random(5)), identity(random.Random(6))
    later = Grant(
        kind="invite",
        subject=identity(run.rng).peer_id,
        roles=("train",),
        uses=1,
        issued_s=int(NOW_S),
        expires_s=int(NOW_S + DAY_S),
    )
    held = run.invite(roles=("train", "serve"), uses=5, peer=peer).grants
    with pytest.raises(NotInvited, match="must not invite others"):
        check_grants(run.run_id, run.owner.peer_id, (*held, issue(run.run_id, peer, later)), NOW_S)
    own = issue(run.run_id, run.owner, replace(held[0], kind="invite", subject=key.peer_id, roles=ROLES))
    with pytest.raises(NotInvited, match="may sign grants for peers only"):
        check_grants(run.run_id, run.owner.peer_id, (own, issue(run.run_id, key, later)), NOW_S)


def test_a_capability_is_refused_from_its_expiration_on_and_when_it_is_dated_in_the_future() -> None:
    run = InvitedRun(7)
    grants = run.invite(peer=identity(run.rng), days=1.0).grants
    check_grants(run.run_id, run.owner.peer_id, grants, NOW_S + DAY_S - 1)
    with pytest.raises(NotInvited, match="has expired"):
        check_grants(run.run_id, run.owner.peer_id, grants, NOW_S + DAY_S)
    with pytest.raises(NotInvited, match="in the future"):
        check_grants(run.run_id, run.owner.peer_id, grants, NOW_S - 301)


def test_roles_are_named_in_their_order_and_unknown_ones_are_refused() -> None:
    assert roles_of(["invite", "train"]) == ("train", "invite")
    for names in ([], ["trian"]):
        with pytest.raises(UsageError, match="the roles are train, serve, observe, invite"):
            roles_of(names)
    assert USES_MAX == 10_000
