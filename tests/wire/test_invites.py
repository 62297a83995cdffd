"""Invited runs over sockets: members reach each other, and everybody else gets one sentence and nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from averaging.matchmaking.service.wire import JOIN
from averaging.optim.exchange import REPORT
from moe.client.remote import RemoteExpert
from moe.server.expert_server import Expert, ExpertServer
from swarm.core.errors import NotInvited, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.membership.invite import Invite
from swarm.net.hello import HELLO
from swarm.net.rpc import Method
from swarm.node import Node
from tests.wire.inviting import DAY_S, invite_of

HERE = "127.0.0.1:0"
WAIT_S = 30.0


@pytest.fixture
def owner() -> Iterator[Node]:
    identity = Identity.generate()
    with Node([invite_of(identity).text()], listen=HERE, identity=identity) as node:
        serve(node)
        yield node


def serve(node: Node) -> None:
    """Answer two methods of a run with nothing."""
    for method in (JOIN, REPORT):
        node.handlers.direct(method, functools.partial(_nothing, method))


def _nothing(method: Method[Any, Any], caller: PeerId, request: object) -> Any:
    return method.reply()


async def call(node: Node, other: Node, method: Method[Any, Any]) -> object:
    """Make an empty call."""
    return await node.channels.call(other.contact, method, method.request(), timeout_s=5.0)


def reached(node: Node, other: Node) -> bool:
    return node.network.run(node.dht.service.ping(other.contact), 10.0)


def test_members_reach_each_other_in_both_directions(owner: Node) -> None:
    invite = invite_of(owner.identity, owner)
    with Node([invite.text()], listen=HERE) as one, Node([invite.text()], listen=HERE) as two:
        assert one.wait_joined(10)
        assert two.wait_joined(10)
        assert reached(one, two)
        assert reached(two, one)
        assert reached(owner, two)
        one.dht.store("public/word", "known", ttl_s=60)
        found = two.dht.get("public/word")
        assert found is not None
        assert found.value == "known"
        for node, others in ((one, (two, owner)), (owner, (one, two))):
            assert all(node.standing.is_member(other.peer_id, invite.run_id) for other in others)


def test_a_stranger_is_refused_with_one_sentence_and_gets_nothing(owner: Node) -> None:
    owner.dht.store("public/word", "secret", ttl_s=60)
    with Node(owner.addresses, listen=HERE) as stranger:
        assert not stranger.wait_joined(1.0)
        assert "is for invited peers only: a peer joins with an invite" in stranger.not_invited
        assert "\n" not in stranger.not_invited
        assert stranger.dht.get("public/word") is None
        assert not reached(stranger, owner)
        with pytest.raises(NotInvited, match="takes no part in run"):
            owner.network.run(call(owner, stranger, HELLO), 10.0)
        assert owner.dht.service.overlay.table.contact(stranger.peer_id) is None


def test_an_expired_invite_is_refused_by_this_process_and_an_expired_capability_by_others(
    owner: Node,
) -> None:
    old = invite_of(owner.identity, owner, now_s=time.time() - DAY_S)
    with pytest.raises(UsageError, match="the invite has expired: ask for a new one"):
        Node([old.text()], listen=HERE)
    with Node([invite_of(owner.identity, owner).text()], listen=HERE) as guest:
        assert guest.wait_joined(10)
        assert guest.membership is not None
        guest.membership.capability = old.capability_of(owner.peer_id, 0.0) or old.grants
        guest.network.run(guest.channels.forget(owner.peer_id), 5.0)
        with pytest.raises(NotInvited, match="the invite has expired"):
            guest.network.run(call(guest, owner, HELLO), 10.0)


def test_a_revoked_peer_is_refused_at_once_and_not_called_any_more(owner: Node) -> None:
    invite = invite_of(owner.identity, owner)
    with Node([invite.text()], listen=HERE) as guest:
        assert guest.wait_joined(10)
        assert reached(owner, guest)
        assert owner.membership is not None
        owner.network.loop.call_soon_threadsafe(owner.membership.admission.revoke, [invite.subject])
        assert not reached(guest, owner)
        assert not owner.standing.is_member(guest.peer_id)
        with pytest.raises(NotInvited, match="joins with an invite"):
            guest.network.run(call(guest, owner, HELLO), 10.0)
    with Node([invite.text()], listen=HERE) as again:
        assert not again.wait_joined(1.0)
        assert "the owner of the run has revoked this peer's invite" in again.not_invited


def test_an_observer_may_not_train(owner: Node) -> None:
    with Node([invite_of(owner.identity, owner, roles=("observe",)).text()], listen=None) as observer:
        assert observer.wait_joined(10)
        for method in (JOIN, REPORT):
            with pytest.raises(NotInvited, match="needs the role"):
                observer.network.run(call(observer, owner, method), 10.0)
    with Node([invite_of(owner.identity, owner, roles=("train",)).text()], listen=None) as trainer:
        for method in (JOIN, REPORT):
            assert trainer.network.run(call(trainer, owner, method), 10.0) == method.reply()


def test_an_invite_for_one_peer_refuses_others_and_a_used_up_invite_refuses_all(owner: Node) -> None:
    identity = Identity.generate()
    invite = invite_of(owner.identity, owner, peer=identity.peer_id)
    with pytest.raises(UsageError, match="this invite is for peer"):
        Node([invite.text()], listen=HERE)
    with Node([invite.text()], listen=HERE, identity=identity) as guest:
        assert guest.wait_joined(10)
        assert guest.entry == ""
    single = invite_of(owner.identity, owner, uses=1)
    with Node([single.text()], listen=HERE) as first:
        assert first.wait_joined(10)
        assert Invite.parse(first.entry).contacts[0] == first.contact
        first_signed_s = first.membership.capability[-1].issued_s if first.membership else 0
        while int(time.time()) <= first_signed_s:
            time.sleep(0.05)
        with Node([single.text()], listen=HERE) as second:
            assert not second.wait_joined(1.0)
            assert "this invite was for 1 peer and is used up" in second.not_invited


def test_an_entry_point_takes_part_in_the_dht_and_in_nothing_else() -> None:
    identity = Identity.generate()
    invite = invite_of(identity)
    with (
        Node(listen=HERE) as entry,
        Node([*entry.addresses, invite.text()], listen=HERE, identity=identity) as owner,
        Node([invite.with_contacts([entry.contact, owner.contact]).text()], listen=HERE) as guest,
    ):
        assert owner.wait_joined(10)
        assert guest.wait_joined(10)
        serve(owner)
        assert reached(entry, owner)
        assert reached(guest, owner)
        with pytest.raises(NotInvited, match="joins with an invite"):
            entry.network.run(call(entry, owner, JOIN), 10.0)


def test_a_member_that_was_named_as_an_address_gets_nothing_after_its_revocation(owner: Node) -> None:
    invite = invite_of(owner.identity, owner)
    with Node([invite.text()], listen=HERE) as guest:
        assert guest.wait_joined(10)
        second = invite_of(owner.identity).with_contacts([guest.contact, owner.contact])
        with Node([second.text()], listen=HERE) as other:
            assert other.wait_joined(10)
            assert reached(guest, other)
            assert other.membership is not None
            other.network.loop.call_soon_threadsafe(other.membership.admission.revoke, [invite.subject])
            assert not reached(guest, other)


def test_experts_of_a_peer_without_the_role_are_not_called() -> None:
    """A peer that may only observe hosts the expert, too. Nobody sends it a sample."""
    identity = Identity.generate()
    with Node([invite_of(identity).text()], listen=HERE, identity=identity) as owner:
        observing, training = (
            invite_of(identity, owner, roles=(role,)).text() for role in ("observe", "train")
        )
        with Node([observing], listen=HERE) as observer, Node([training], listen=HERE) as trainer:
            assert observer.wait_joined(WAIT_S)
            assert trainer.wait_joined(WAIT_S)
            hostile = ExpertServer(observer, {"ffn.0": Expert(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))})
            remote = RemoteExpert(trainer, "ffn.0", forward_timeout_s=WAIT_S)
            with pytest.raises(NotInvited, match="lacks the role serve"):
                remote(torch.zeros(2, 8))
            with ExpertServer(owner, {"ffn.0": Expert(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))}):
                remote = RemoteExpert(trainer, "ffn.0", forward_timeout_s=WAIT_S)
                for _ in range(5):
                    assert remote(torch.zeros(2, 8)).shape == (2, 8)
            assert hostile.statistics().experts["ffn.0"].counts.forward_requests == 0
