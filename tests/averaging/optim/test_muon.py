"""Muon for the matrices inside a model and AdamW for the rest."""

from __future__ import annotations

import copy

import torch
from torch import nn

from averaging.optim.muon import MuonWithAdamW, hidden_matrices
from averaging.optim.state.training_state import TrainingState


class Tiny(nn.Module):
    """An embedding, a hidden layer with its norm, and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(self.embedding(tokens)).tanh()))


def backward(net: nn.Module, seed: int) -> None:
    tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(seed))
    net.zero_grad()
    nn.functional.cross_entropy(net(tokens), tokens.roll(1)).backward()


def test_embedding_and_head_are_not_for_muon_tied_or_not() -> None:
    for tied in (False, True):
        net = Tiny(tied=tied)
        assert [id(p) for p in hidden_matrices(net)] == [id(net.hidden.weight)]


def test_without_an_embedding_the_last_layer_is_the_head() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    assert [id(p) for p in hidden_matrices(net)] == [id(net[0].weight), id(net[2].weight)]


def test_frozen_parameters_and_convolutions_are_not_for_muon() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight.requires_grad_(False)
    assert [id(p) for p in hidden_matrices(net)] == [id(net[2].weight)]
    MuonWithAdamW(net)


def test_the_steps_are_those_of_torchs_two_optimizers() -> None:
    net, oracle = Tiny(), Tiny()
    inner = MuonWithAdamW(net, lr=0.01, weight_decay=0.1)
    muon = torch.optim.Muon(
        [oracle.hidden.weight], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    decayed, plain = [p for p in oracle.parameters() if p.dim() >= 2], [oracle.hidden.bias]
    plain += list(oracle.norm.parameters())
    rest = torch.optim.AdamW(
        [
            {"params": [p for p in decayed if p is not oracle.hidden.weight], "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for seed in range(4):
        backward(net, seed)
        inner.step()
        backward(oracle, seed)
        muon.step()
        rest.step()
    for ours, theirs in zip(net.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_saved_state_resumes_exactly() -> None:
    net = Tiny()
    inner = MuonWithAdamW(net, lr=0.01)
    for seed in range(3):
        backward(net, seed)
        inner.step()
    again = copy.deepcopy(net)
    resumed = MuonWithAdamW(again, lr=0.01)
    resumed.load_state_dict(copy.deepcopy(inner.state_dict()))
    for one, optimizer in ((net, inner), (again, resumed)):
        backward(one, 7)
        optimizer.step()
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_newcomer_takes_the_state_of_the_swarm() -> None:
    net, late = Tiny(), Tiny()
    state = TrainingState(MuonWithAdamW(net, lr=0.01))
    for seed in range(3):
        backward(net, seed)
        state.inner.step()
    state.mark_changed(3)
    newcomer = TrainingState(MuonWithAdamW(late, lr=0.01))
    newcomer.load(bytearray(state.snapshot().blob))
    assert newcomer.epoch == 3
    assert newcomer.snapshot().digest == state.snapshot().digest
    for one in (state, newcomer):
        backward(net if one is state else late, 9)
        one.inner.step()
    for ours, theirs in zip(net.parameters(), late.parameters(), strict=True):
        assert torch.equal(ours, theirs)
