"""The electors after a round follow from what its members did, and say which peers lead the next one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from averaging.history.electors import Known, Register
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import run_virtual
from tests.sim.round_scene import Scene, lineage

OTHER = SeededIdentity(99)


@pytest.mark.parametrize("register", [Register(), Register(at_once=0, known=(Known(OTHER.peer_id, 5),))])
def test_a_contributor_that_sends_nothing_is_no_elector_after_the_round(register: Register) -> None:
    """Before, the certificate counted everybody who was to contribute: three groups made an elector of a
    stranger that sent nothing.
    """
    scene = Scene(14, [1.0] * 4)
    electors = [peer.peer_id for peer in scene.peers[:3]]
    idle = scene.peers[3]
    known = tuple(replace(one, peer=idle.peer_id) for one in register.known)
    register = replace(register, known=known)
    for place in range(3):
        scene.histories[place] = replace(lineage(electors, {}), register=register)
    scene.group = replace(scene.group, reducers=frozenset(electors))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(3)]
        for task in running:
            outcome = task.result()
            assert outcome.certificate is not None, outcome
            outcome.certificate.check(electors, register)
            assert idle.peer_id in outcome.certificate.proposal.electors, "if it had worked"
            assert outcome.certificate.workers == tuple(electors)
            assert outcome.certificate.electors == tuple(electors)
            assert outcome.certificate.register.rounds_of(idle.peer_id) == (5 if known else 0)
        await scene.close()

    run_virtual(main())


def test_an_elector_that_missed_the_last_certificate_does_not_lead() -> None:
    """One that leads and never begins would hold the others once for each certificate that it may miss."""
    first, second, third = [SeededIdentity(number).peer_id for number in range(3)]
    history = lineage([first, second, third], {})
    assert history.present == (first, second, third)
    assert replace(history, register=Register(misses=(1, 0, 2))).present == (second,)
    assert replace(history, register=Register(misses=(1, 1, 1))).present == (first, second, third)
