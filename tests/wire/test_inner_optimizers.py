"""Peers on real sockets whose inner optimizer is not Adam: rounds, late joiners, states to resume from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging.optim.muon import MuonWithAdamW
from tests.wire.trainers import BATCH, TARGET, batch, build, one_more, swarm_of, together


def muon(net: torch.nn.Module) -> torch.optim.Optimizer:
    return MuonWithAdamW(net, lr=0.01, weight_decay=0.1)


def adafactor(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(net.parameters(), lr=0.01)


class SignedMomentum(torch.optim.Optimizer):
    """An optimizer that a user wrote: steps by the sign of a running mean."""

    def __init__(self, parameters: object, lr: float = 0.01, decay: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["decay"])
                    p.sub_(mean.sign() * group["lr"])


def users_own(net: torch.nn.Module) -> torch.optim.Optimizer:
    return SignedMomentum(net.parameters())


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
@pytest.mark.parametrize("inner", [muon, adafactor, users_own], ids=lambda inner: inner.__name__)
def test_peers_stay_equal_and_one_that_comes_late_takes_their_state(
    inner: Callable[[torch.nn.Module], torch.optim.Optimizer], mode: str
) -> None:
    run = f"inner {inner.__name__} {mode}"
    with swarm_of(2, run, inner=inner, mode=mode) as peers:
        together([lambda peer=peer: peer.train_to(3) for peer in peers])
        assert len({peer.opt.state_digest() for peer in peers}) == 1
        with one_more(peers, run, 2, seed=9, inner=inner, mode=mode) as late:
            assert late.opt.load_state_from_peers(timeout_s=30).loaded
            assert late.opt.state_digest() == peers[0].opt.state_digest()
            together([lambda peer=peer: peer.train_to(6) for peer in (*peers, late)])
            assert len({peer.opt.state_digest() for peer in (*peers, late)}) == 1
        saved, digest = copy.deepcopy(peers[0].opt.state_dict()), peers[0].opt.state_digest()
        weights = copy.deepcopy(peers[0].net.state_dict())
    with swarm_of(1, f"{run} again", inner=inner, mode=mode) as [resumed]:
        resumed.net.load_state_dict(weights)
        resumed.opt.load_state_dict(saved)
        assert resumed.opt.state_digest() == digest
        resumed.train_to(7)
        assert resumed.reports[-1].alone
        if mode == "gradients":
            expected = one_epoch_more(weights, saved, inner, [one.seed for one in resumed.taken])
            ours, theirs, before = (
                torch.cat([p.detach().flatten() for p in net])
                for net in (resumed.net.parameters(), expected.parameters(), weights.values())
            )
            # a sum in another order turns the sign of a mean near zero, and Muon computes in bfloat16
            assert (ours - theirs).abs().mean() <= 0.2 * (theirs - before).abs().mean()


def one_epoch_more(
    weights: dict[str, torch.Tensor],
    saved: dict[str, Any],
    inner: Callable[[torch.nn.Module], torch.optim.Optimizer],
    seeds: list[int],
) -> torch.nn.Module:
    """Return the model after one epoch of these batches, with plain torch."""
    assert len(seeds) >= TARGET // BATCH
    net = build()
    net.load_state_dict(weights)
    plain = inner(net)
    plain.load_state_dict({key: value for key, value in saved.items() if key != "swarm"})
    for seed in seeds:
        inputs, targets = batch(seed)
        ((net(inputs) - targets).square().mean() / len(seeds)).backward()
    plain.step()
    return net
