"""A training that loses its quorum, at every moment of an epoch: how soon those that are left go on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from averaging.history.lineage import GRACE_S_MIN
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

EPOCH_S = 2.0
# after the grace: until reports of the others have expired, a round is given up, and two epochs of two peers
GOES_ON_S = GRACE_S_MIN + 20.0


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("moment", [0, 1, 4, 14, 22])
def test_peers_that_lost_the_quorum_during_a_search_for_a_group_go_on_after_the_grace(
    moment: int, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four peers, the two that decide a tie are killed or cut off. Of the others, one may be in a search
    for a group, while the other one has noticed. `moment`: in 24ths of an epoch, and the seed.
    """
    caplog.set_level(logging.CRITICAL)
    goes_on_s = run_virtual(_seconds_until_two_of_four_go_on(moment, cut=cut))
    assert goes_on_s is not None
    assert goes_on_s <= GOES_ON_S


async def _seconds_until_two_of_four_go_on(moment: int, *, cut: bool) -> float | None:
    violations = Violations()
    checks = TrainingChecks(violations, step_s_max=600.0)
    network = SimulatedNetwork(moment, LinkConfig(delay_s=0.03, jitter=0.5))
    loop, found = asyncio.get_running_loop(), None
    async with asyncio.TaskGroup() as group:
        swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=64), checks.on_step, group)
        peers = [await swarm.add(batch=4, compute_s=0.5 * (1 + 0.1 * n)) for n in range(4)]
        await asyncio.sleep(10.0 + EPOCH_S * moment / 24)
        for peer in peers:
            checks.ledger.read(peer, loop.time())
        electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
        left = [one for one in peers if one.peer.peer_id not in electors[:2]]
        if cut:
            network.partition([one.peer for one in left])
        else:
            for one in [one for one in peers if one not in left]:
                await swarm.kill(one)
        began_s, epoch = loop.time(), max(_epoch(one) for one in left)
        while loop.time() < began_s + 2 * GOES_ON_S and found is None:
            await asyncio.sleep(0.25)
            if all(_epoch(one) > epoch + 1 for one in left):
                found = loop.time() - began_s
        await swarm.close()
    assert not violations.count, violations.lines
    return found


def _epoch(one: TrainingPeer) -> int:
    assert one.optimizer is not None
    return one.optimizer.epoch
