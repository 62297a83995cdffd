"""A mixture that calls hundreds of experts of one server in one pass, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

import swarm
from moe.protocol.call_slots import OPEN_MAX, CallSlots
from moe.protocol.calls import Description, ExpertCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid
from swarm.core.errors import DeadlineExceeded
from swarm.testing.identities import SeededIdentity
from tests.wire.event_loop import run_on_loop
from tests.wire.expert_pair import pair

COUNT, WIDTH = 300, 8


class Shift(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def test_hundreds_of_experts_of_one_server_answer_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a server refused what exceeded 128 requests of one caller, or 256 calls, and samples went
    to worse experts or got no gradient. Every expert was described by a call of its own before the first
    pass, though all have one schema.
    """
    described: list[ExpertUid] = []
    describe = ExpertCalls.describe

    async def note(
        calls: ExpertCalls, replica: ExpertReplica, uids: Sequence[ExpertUid], *, timeout_s: float
    ) -> list[Description | None]:
        described.extend(uids)
        return await describe(calls, replica, uids, timeout_s=timeout_s)

    monkeypatch.setattr(ExpertCalls, "describe", note)
    experts = {f"ffn.{n}": swarm.Expert(Shift(n), (torch.zeros(1, WIDTH),)) for n in range(COUNT)}
    with pair(experts) as both:
        layer = swarm.RemoteMixtureOfExperts(
            both.guest,
            WIDTH,
            grid=f"ffn.[0:{COUNT}]",
            k_best=COUNT,
            k_min=COUNT,
            backward_k_min=COUNT,
            forward_timeout_s=30.0,
        )
        for _ in range(2):
            x = torch.randn(3, WIDTH).requires_grad_()
            y = layer(x)
            (scores,) = layer.gate(x)
            shift = (scores.softmax(dim=1) * torch.arange(COUNT)).sum(dim=1, keepdim=True)
            assert torch.allclose(y, x + shift, rtol=1e-4)
            y.sum().backward()
            for report in (layer.last_forward, layer.last_backward):
                assert report is not None
                assert len(report.answered) == COUNT
                assert not report.failed
        assert len(described) == 1
        assert not any(one.refusals for one in both.server.statistics().experts.values())


def test_a_call_waits_for_a_slot_until_its_deadline() -> None:
    async def scenario() -> None:
        calls, peer, other = CallSlots(), SeededIdentity("a").peer_id, SeededIdentity("b").peer_id
        loop, under_way, most = asyncio.get_running_loop(), 0, 0

        async def call(seconds: float) -> None:
            nonlocal under_way, most
            if not calls.try_enter(peer):
                await calls.wait(peer, 1, loop.time() + 10.0)
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(seconds)
            under_way -= 1
            calls.leave(peer)

        await asyncio.gather(*(call(0.01) for _ in range(3 * OPEN_MAX)))
        assert most == OPEN_MAX
        held = [loop.create_task(call(0.3)) for _ in range(OPEN_MAX)]
        await asyncio.sleep(0)
        assert not calls.try_enter(peer)
        with pytest.raises(DeadlineExceeded, match="64 other calls"):
            await calls.wait(peer, 1, loop.time() + 0.05)
        assert calls.try_enter(other)
        cancelled = loop.create_task(calls.wait(peer, 1, loop.time() + 10.0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*held)
        await call(0.0)
        assert under_way == 0

    run_on_loop(scenario())


def test_calls_that_share_a_message_wait_for_all_their_slots_and_nobody_overtakes_them() -> None:
    async def scenario() -> None:
        calls, peer, came = CallSlots(), SeededIdentity("a").peer_id, list[str]()
        loop = asyncio.get_running_loop()

        async def enter(name: str, count: int) -> None:
            await calls.wait(peer, count, loop.time() + 10.0)
            came.append(name)

        assert calls.try_enter(peer, OPEN_MAX - 2)
        large, small = loop.create_task(enter("large", 3)), loop.create_task(enter("small", 1))
        await asyncio.sleep(0)
        assert not calls.try_enter(peer), "others wait for the two slots"
        calls.leave(peer)
        await asyncio.gather(large)
        assert came == ["large"]
        calls.leave(peer)
        await asyncio.gather(small)
        waiting = [loop.create_task(enter(name, count)) for name, count in (("many", OPEN_MAX), ("one", 1))]
        await asyncio.sleep(0)
        calls.leave(peer)
        waiting[0].cancel()
        await asyncio.gather(waiting[1])
        assert came == ["large", "small", "one"], "one that is cancelled holds up nobody"
        calls.leave(peer, OPEN_MAX)
        assert calls.try_enter(peer, OPEN_MAX)

    run_on_loop(scenario())
