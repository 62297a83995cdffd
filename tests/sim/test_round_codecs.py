"""Rounds of the real service in codecs of a few bits: members, clients and auxiliaries hold the same bytes,
near the mean.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from swarm.compression import find
from swarm.testing.virtual_loop import run_virtual
from tests.sim.random_rounds import Scenario, check, scenario


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "sign", "topk"])
@pytest.mark.parametrize("seed", range(8))
def test_all_members_commit_the_same_bytes(codec: str, seed: int) -> None:
    given = scenario(seed)
    given.group = replace(given.group, codec=codec)

    async def main(given: Scenario = given) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {place: tasks.create_task(given.run(place)) for place in range(len(given.peers))}
        outcomes = {place: task.result() for place, task in running.items()}
        check(outcomes, given, None)
        weights = [member.weight for member in given.group.members]
        vector = outcomes[0].vector
        assert not outcomes[0].failed
        assert vector is not None
        if vector.numel():
            mean = sum(
                weight * values.double() for weight, values in zip(weights, given.vectors, strict=True)
            ) / sum(weights)
            largest = max(float(values.abs().max()) for values in given.vectors)
            # at the senders, and at the reducer, of what may be a bit larger
            bound = 2.0 * find(codec).error_bound(largest) * 1.01
            assert float((vector.double() - torch.as_tensor(mean)).abs().max()) <= bound
        given.close()
        await given.network.close()

    run_virtual(main())
