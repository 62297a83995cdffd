"""A killed trainer is noticed at once although its DataLoader workers live on, because they hold none of its
connections.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.chaos.processes import Worker

pytestmark = pytest.mark.chaos
RANKS = 4
VICTIM = 1

TRAINER = """
import json, sys, time

import torch
from torch.utils.data import DataLoader, Dataset

import swarm


class Numbers(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.tensor(float(index))


setup = json.loads(sys.stdin.readline())
node = swarm.Node(bootstrap=setup["bootstrap"], listen="127.0.0.1:0")
tensor = torch.full((16_000_000,), float(setup["rank"]))
averager = swarm.Averager(node, [tensor], name="orphans", codec="float32", target_group_size=4)
print(json.dumps([list(map(str, node.addresses)), str(node.peer_id)]), flush=True)
for line in sys.stdin:
    tensor.fill_(float(setup["rank"]))
    # the workers are forked while all connections of the previous round are open
    batches = iter(DataLoader(Numbers(), batch_size=8, num_workers=2))
    next(batches)
    print(json.dumps("begun"), flush=True)
    result = averager.step(timeout_s=40.0, round_key=line.strip())
    left_out = {str(peer_id): why for peer_id, why in result.left_out.items()}
    mean, peers = tensor[0].item(), len(result.peers)
    values = [result.failed, result.reason, result.digest, mean, peers, left_out, time.time()]
    print(json.dumps(values), flush=True)
    del batches
"""


def test_orphaned_dataloader_workers_hold_up_no_peer() -> None:
    trainers = [Worker(TRAINER) for _ in range(RANKS)]
    try:
        bootstrap: list[str] = []
        names = []
        for rank, trainer in enumerate(trainers):
            trainer.tell({"bootstrap": bootstrap, "rank": rank})
            addresses, name = trainer.hear()
            bootstrap = bootstrap or addresses
            names.append(name)
        for key in ("first", "second"):
            for trainer in trainers:
                trainer.tell(key)
            for trainer in trainers:
                assert trainer.hear() == "begun"
            if key == "first":
                results = [trainer.hear() for trainer in trainers]
                assert all(
                    not failed and mean == 1.5 and peers == RANKS for failed, _, _, mean, peers, *_ in results
                ), results
        victim = trainers[VICTIM]
        orphans = psutil.Process(victim.process.pid).children()
        time.sleep(0.4)
        os.kill(victim.process.pid, signal.SIGKILL)
        killed_s = time.time()
        results = [trainer.hear() for trainer in trainers if trainer is not victim]
        assert len(orphans) == 2
        assert all(orphan.is_running() for orphan in orphans), "they were to outlive it"
        assert all(not failed for failed, *_ in results), results
        assert len({digest for _, _, digest, *_ in results}) == 1
        for _, _, _, mean, peers, left_out, ended_s in results:
            assert peers == RANKS
            assert mean in (1.5, 5.0 / 3.0) or mean == pytest.approx(5.0 / 3.0)
            assert mean == 1.5 or names[VICTIM] in left_out
            assert ended_s - killed_s < 6.0
    finally:
        for trainer in trainers:
            trainer.end()
