"""Muon for the matrices inside a model, AdamW for all else, as one optimizer.

Muon orthogonalizes the momentum of a matrix (torch.optim.Muon). It is for the matrices that map one hidden
vector to another: embeddings and the last layer, whose rows belong to single tokens or classes, and all that
is not a matrix get AdamW. As an inner optimizer of local steps it needs less communication for the same
loss: MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of a model for Muon: all parameters with two dimensions, but not those of
    embeddings, nor of layers that end in as many features as an embedding has rows; in a model without
    embeddings, nor those of its last linear layer.
    """
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    rows = {one.num_embeddings for one in embeddings}
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    heads = [one for one in linear if one.out_features in rows] if rows else linear[-1:]
    left_out = {id(one.weight) for one in (*heads, *embeddings)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in left_out]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices of a model, AdamW for its other parameters, with one learning rate.

    Args:
        model: The model whose parameters are optimized.
        lr: Learning rate of AdamW. The steps of Muon are scaled to the same size (`match_rms_adamw` of
            torch.optim.Muon, arXiv 2502.16982).
        weight_decay: For matrices and embeddings; vectors have none.
        momentum: Of Muon.
        betas: Of AdamW.
        matrices: The parameters for Muon; None: `hidden_matrices(model)`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        matrices: Iterable[nn.Parameter] | None = None,
    ) -> None:
        muon = list(hidden_matrices(model) if matrices is None else matrices)
        rest = [p for p in model.parameters() if p.requires_grad and all(p is not one for one in muon)]
        decayed = [p for p in rest if p.dim() >= 2]
        plain = [p for p in rest if p.dim() < 2]
        parts: list[tuple[torch.optim.Optimizer, bool]] = []
        if muon:
            muon_part = torch.optim.Muon(
                muon, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            parts.append((muon_part, True))
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if groups:
            parts.append((torch.optim.AdamW(groups, lr=lr, betas=betas), False))
        self._parts = parts
        super().__init__(
            [{**group, "muon": is_muon} for part, is_muon in parts for group in part.param_groups], {"lr": lr}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, is_muon in self._parts:
            # groups and statistics are this optimizer's: a loaded state has replaced them
            part.param_groups = [group for group in self.param_groups if group["muon"] == is_muon]
            part.state = self.state
            part.step()
        return loss
