"""Peers without an invite call the experts of a grid for invited peers, and neither train nor host them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import swarm
from swarm.core.errors import NotInvited, SwarmError
from swarm.core.identity import Identity
from tests.wire.expert_pair import expert, network, sgd
from tests.wire.inviting import invite_of

HERE = "127.0.0.1:0"
NAMES = ("ffn.0", "ffn.1")


@pytest.fixture
def owner() -> Iterator[swarm.Node]:
    identity = Identity.generate()
    with swarm.Node([invite_of(identity).text()], listen=HERE, identity=identity) as node:
        assert node.membership is not None
        node.membership.guests = "call"
        yield node


def values(one: swarm.Expert) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.module.parameters()]


def layers(node: swarm.Node) -> list[Any]:
    return [
        swarm.RemoteExpert(node, "ffn.0"),
        swarm.RemoteMixtureOfExperts(node, 16, grid="ffn.[0:2]", k_best=2, k_min=2),
        swarm.RemoteSequential(node, "ffn.[0:2]"),
    ]


def test_a_guest_calls_experts_and_cannot_train_them(owner: swarm.Node) -> None:
    hosted = {name: expert(network(), sgd) for name in NAMES}
    before = [values(one) for one in hosted.values()]
    x = torch.randn(4, 16, requires_grad=True)
    with (
        swarm.ExpertServer(owner, hosted),
        swarm.Node(owner.addresses, listen=HERE) as guest,
        swarm.Node([invite_of(owner.identity, owner).text()], listen=HERE) as member,
    ):
        for layer in layers(guest):
            y = layer(x)
            assert y.shape == (4, 16)
            with pytest.raises(NotInvited, match="trained by invited peers only"):
                y.sum().backward()
        with pytest.raises(SwarmError, match="invited peers only"):
            swarm.RemoteExpert(guest, "ffn.0").download()
        for one, old in zip(hosted.values(), before, strict=True):
            assert one.version == 0
            assert all(map(torch.equal, values(one), old))
        for layer in layers(member):
            layer(x).sum().backward()
        assert [one.version > 0 for one in hosted.values()] == [True, True]
        assert swarm.RemoteExpert(member, "ffn.0").download()


def test_a_guest_gets_the_gradients_of_its_inputs_from_frozen_experts(owner: swarm.Node) -> None:
    module = network()
    x = torch.randn(4, 16, requires_grad=True)
    with (
        swarm.ExpertServer(owner, {"ffn.0": expert(module)}),
        swarm.Node(owner.addresses, listen=None) as guest,
    ):
        swarm.RemoteExpert(guest, "ffn.0")(x).square().sum().backward()
        (wanted,) = torch.autograd.grad(module(x).square().sum(), x)
        torch.testing.assert_close(x.grad, wanted)


def test_nobody_is_sent_to_the_experts_of_a_guest(owner: swarm.Node) -> None:
    """A stranger hosts the expert, too, and wants to declare it: members store nothing for strangers."""
    with (
        swarm.ExpertServer(owner, {"ffn.0": expert(network(), sgd)}),
        swarm.Node(owner.addresses, listen=HERE) as hostile,
        swarm.Node(owner.addresses, listen=None) as guest,
        swarm.Node([invite_of(owner.identity, owner).text()], listen=HERE) as member,
    ):
        assert hostile.wait_joined(10.0)
        with swarm.ExpertServer(hostile, {"ffn.0": expert(network(), sgd)}) as server:
            for node in (guest, member):
                (found,) = swarm.find_experts(node, "ffn.*")
                assert [one.peer_id for one in found.replicas] == [owner.peer_id]
                for _ in range(3):
                    swarm.RemoteExpert(node, "ffn.0")(torch.zeros(2, 16))
            assert server.statistics().experts["ffn.0"].counts.forward_requests == 0


@pytest.mark.parametrize("guests", ["none", "train"])
def test_the_rights_of_guests_follow_the_grid(owner: swarm.Node, guests: Any) -> None:
    assert owner.membership is not None
    owner.membership.guests = guests
    hosted = expert(network(), sgd)
    with swarm.ExpertServer(owner, {"ffn.0": hosted}), swarm.Node(owner.addresses, listen=None) as guest:
        remote = swarm.RemoteExpert(guest, "ffn.0", forward_timeout_s=3.0)
        if guests == "none":
            with pytest.raises(SwarmError):
                remote(torch.zeros(2, 16))
            assert "is for invited peers only" in guest.not_invited
        else:
            remote(torch.ones(2, 16)).sum().backward()
        assert hosted.version == (guests == "train")
