"""A byte-level model whose blocks exchange codes of low rank, as stages of a pipeline do, compared with the
same model with whole activations: the loss after the same number of steps. It runs in one process, because
the network does not change the loss.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.allreduce import Setting
from benchmarks.results import Row, Series
from moe.classes.low_rank import ActivationSubspace
from swarm.run.task import Draw
from swarm.run.tasks.bytelm_model import ByteData, ByteTransformer
from swarm.run.tasks.corpus import read_corpus
from swarm.testing.identities import SeededIdentity

WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 2, 64
RANKS = (32, 16, 8)
STEPS = 400
BATCH = 16
LEARNING_RATE = 2e-3


def rows(setting: Setting) -> list[Row]:
    """Train with whole activations and with codes of each rank, and return a row for each rank."""
    torch.set_num_threads(1)
    corpus = read_corpus(None, bytes_max=1 << 20, sample_bytes=CONTEXT + 1)
    data = ByteData(corpus, context=CONTEXT, device=torch.device("cpu"))
    whole = trained(data, None)
    setting.say(f"  low rank: {whole:.3f} with whole activations")
    found = []
    for rank in RANKS:
        loss = trained(data, rank)
        setting.say(f"  low rank: {loss:.3f} with rank {rank}")
        found.append(
            Row(
                identifier=f"experts-low-rank-{rank}",
                workload=(
                    f"byte-level model, {LAYERS} blocks of width {WIDTH}, {STEPS} steps of {BATCH} samples: "
                    f"blocks exchange codes of {rank} numbers, 1/{WIDTH // rank} of the bytes"
                ),
                quantity="validation loss, nats per byte",
                ours=Series(name=f"swarm: rank {rank}", unit="nats", samples=(loss,)),
                peer=Series(name="whole activations", unit="nats", samples=(whole,)),
                aim=None,
                shown="ours / peer",
                limit="what lies outside the subspace is lost between blocks",
            )
        )
    return found


def trained(data: ByteData, rank: int | None) -> float:
    """Return the validation loss of a new model after training; None: with whole activations."""
    torch.manual_seed(0)
    model = ByteTransformer(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT, seed=0)
    if rank is not None:
        subspace = ActivationSubspace(WIDTH, rank)
        stages = [subspace.stage(block) for block in model.blocks]
        model.blocks = nn.ModuleList([subspace.encoder(), *stages, subspace.decoder()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data.start_epoch(Draw(run_id="low rank", epoch=0, peer_id=SeededIdentity("trainer").peer_id))
    for _ in range(STEPS):
        optimizer.zero_grad()
        data.loss(model, BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return data.validation_loss(model)
