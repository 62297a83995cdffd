"""Streams that break while their member is alive: whether its values count."""

from __future__ import annotations

import pytest

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.values import RoundState
from averaging.allreduce.outcome import left_out
from swarm.testing.identities import SeededIdentity
from tests.averaging.allreduce.setups import CHUNK_BYTES, round_setup

IDENTITIES = [SeededIdentity(f"stream {place}") for place in range(3)]
SENDER, CHUNKS = 1, 2


@pytest.mark.parametrize("sent", [0, 1, CHUNKS])
def test_a_sender_whose_stream_breaks_is_left_out_only_if_values_are_missing(sent: int) -> None:
    """A member that has sent everything closes its stream as soon as the round is committed, perhaps before
    the write of its last average has returned here.
    """
    machine = RoundMachine(round_setup(IDENTITIES, chunks_each=CHUNKS))
    machine.begin()
    machine.step(on.MemoryPrepared(), 0.0)
    machine.step(on.SenderOpened(SENDER), 0.0)
    for chunk in machine.shard.chunks[:sent]:
        machine.step(on.ContributionArrived(SENDER, chunk.index, CHUNK_BYTES), 0.1)
    effects = machine.step(on.SenderStreamBroke(SENDER, "its connection closed"), 0.2)
    assert [type(effect) for effect in effects] == [do.Ping]
    effects = machine.step(on.PingAnswered(SENDER, RoundState.RUNNING, "", 0.01), 0.3)
    told = [effect for effect in effects if isinstance(effect, do.RefuseSender)]
    if sent == CHUNKS:
        assert not told
        assert left_out(machine) == {}
    else:
        assert [effect.sender for effect in told] == [SENDER]
        assert "its connection closed" in left_out(machine)[SENDER]
