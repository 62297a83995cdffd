"""One expert on several servers, in virtual time: who is asked, when a second one is, and what is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

from moe.asking import Answered, Asking, AskingConfig
from moe.calls import AS_THEY_ARE, Backwarded, Description, Forwarded, GradientPass, Travel
from moe.declarations import Load, Replica
from moe.errors import ExpertApplied, ExpertFailed, ExpertMissing, ExpertOverloaded, ExpertRefused
from moe.schema import Leaf, Schema
from moe.uid import ExpertUid
from swarm.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, SwarmError
from swarm.ids import Contact, PeerId
from swarm.testing.virtual_loop import run_virtual

UID = ExpertUid.parse("ffn.0")
SCHEMA = Schema((Leaf(torch.float32, (2,)),), Leaf(torch.float32, (2,)))
X = [torch.zeros(1, 2)]
Behaviour = float | SwarmError  # seconds until it answers, or what it raises after a tenth of one


def replica(number: int, wait_s: float = 0.0) -> Replica:
    return Replica(Contact(PeerId(bytes([number]) * 32)), SCHEMA.digest, Load(wait_s))


class Servers:
    """Simulated servers: `behave` says what each does, by the first byte of its id. Satisfies `Described`, and reads like a directory."""

    def __init__(self, count: int) -> None:
        self.found = [replica(number) for number in range(count)]
        self.behave: dict[int, list[Behaviour]] = {}  # what is left to do; the last goes on
        self.asked: list[tuple[int, float]] = []
        self.cancelled: list[int] = []
        self.applied: set[bytes] = set()
        self.reads = 0
        self.begun_s = asyncio.get_running_loop().time()

    async def _do(self, one: Replica) -> None:
        number = one.peer_id.public_key[0]
        self.asked.append((number, round(asyncio.get_running_loop().time() - self.begun_s, 3)))
        left = self.behave.get(number, [0.01])
        behaviour = left.pop(0) if len(left) > 1 else left[0]
        try:
            await asyncio.sleep(behaviour if isinstance(behaviour, float) else 0.1)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if isinstance(behaviour, SwarmError):
            raise behaviour

    async def describe(self, replica: Replica, uids: Sequence[ExpertUid], *, timeout_s: float) -> list[Description | None]:
        await self._do(replica)
        return [None]

    async def schema_of(self, replica: Replica, uid: ExpertUid, *, timeout_s: float) -> Schema:
        await self._do(replica)
        return SCHEMA

    async def forward(
        self,
        replica: Replica,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        timeout_s: float,
        travel: Travel = AS_THEY_ARE,
        keep: bool = False,
    ) -> Forwarded:
        try:
            async with asyncio.timeout(timeout_s):
                await self._do(replica)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        return Forwarded(outputs=list(inputs), version=0, request_id=bytes(16), wait_s=0.0)

    async def backward(
        self,
        replica: Replica,
        uid: ExpertUid,
        forwarded: Forwarded,
        tensors: GradientPass,
        *,
        timeout_s: float,
        travel: Travel = AS_THEY_ARE,
    ) -> Backwarded:
        self.applied.add(forwarded.request_id)  # it gets there; what is lost is the answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._do(replica)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        return Backwarded(gradients=[None], version=0, wait_s=0.0)

    async def replicas(self, uids: Sequence[ExpertUid], *, timeout_s: float) -> dict[ExpertUid, tuple[Replica, ...]]:
        self.reads += 1
        return {uid: tuple(self.found) for uid in uids}


def scenario(count: int, run: Callable[[Servers, Asking], Coroutine[Any, Any, None]], config: AskingConfig | None = None) -> None:
    async def main() -> None:
        servers = Servers(count)
        async with asyncio.TaskGroup() as tasks:
            asking = Asking(servers, servers, config, spawn=lambda name, work: tasks.create_task(work()))  # type: ignore[arg-type]
            await run(servers, asking)

    run_virtual(main())


def by(answered: Answered) -> int:
    return answered.replica.peer_id.public_key[0]


def test_one_that_answers_in_time_is_asked_alone() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave = {0: [0.03], 1: [0.01], 2: [0.02]}
        assert [by(await asking.forward(UID, X, timeout_s=5.0)) for _ in range(6)] == [0, 1, 2, 1, 1, 1]  # each once, then the fastest
        assert len(servers.asked) == 6
        assert servers.reads == 1

    scenario(3, run)


def test_the_least_busy_goes_first() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.found = [replica(0, wait_s=3.0), replica(1, wait_s=1.0), replica(2, wait_s=2.0)]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 1

    scenario(0, run)


def test_a_slow_one_is_hedged_after_three_of_its_usual_times_and_then_given_up() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        for number in (0, 1):
            asking.health.answered((servers.found[number].peer_id, UID), 0.1 + number / 100, asyncio.get_running_loop().time())
        servers.behave[0] = [4.0]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 1
        assert servers.asked == [(0, 0.0), (1, 0.3)]
        assert servers.cancelled == [0]

    scenario(2, run)


def test_the_slow_one_may_still_win() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave = {0: [1.5], 1: [9.0]}
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 0
        assert servers.cancelled == [1]

    scenario(2, run)


@pytest.mark.parametrize("error", [NetworkError("broke"), ExpertOverloaded("full", 9), ExpertFailed("failed"), ExpertMissing("gone")])
def test_a_failure_passes_to_the_next_at_once_and_is_remembered(error: SwarmError) -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave[0] = [error, 0.01]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 1
        assert servers.asked == [(0, 0.0), (1, 0.1)]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 1  # the other is avoided
        if not isinstance(error, ExpertMissing):
            await asyncio.sleep(2.0)
            asking.health.answered((servers.found[1].peer_id, UID), 50.0, asyncio.get_running_loop().time())
            assert by(await asking.forward(UID, X, timeout_s=5.0)) == 0  # it is tried again

    scenario(2, run)


def test_a_request_that_is_wrong_is_asked_of_nobody_else() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave = {0: [ExpertRefused("NaN")], 1: [0.01]}
        with pytest.raises(ExpertRefused):
            await asking.forward(UID, X, timeout_s=5.0)
        assert [number for number, _ in servers.asked] == [0]

    scenario(2, run)


def test_when_all_have_left_those_who_came_meanwhile_are_found() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        await asking.forward(UID, X, timeout_s=5.0)
        servers.behave = {0: [NetworkError("gone")], 1: [NetworkError("gone")]}
        servers.found = [replica(7)]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 7

    scenario(2, run)


def test_all_overloaded_is_said_at_once() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave = {number: [ExpertOverloaded("full", 9)] for number in range(3)}
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(ExpertOverloaded):
            await asking.forward(UID, X, timeout_s=60.0)
        assert asyncio.get_running_loop().time() - begun_s < 1.0

    scenario(3, run)


def test_nobody_there_is_said() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        with pytest.raises(NotEnoughPeers):
            await asking.forward(UID, X, timeout_s=5.0)

    scenario(0, run)


def test_the_deadline_holds_when_nobody_answers() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        servers.behave = {number: [1e9] for number in range(3)}
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await asking.forward(UID, X, timeout_s=5.0)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(5.0, abs=0.1)

    scenario(3, run)


def test_who_hosts_it_is_read_again_without_making_a_call_wait() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        await asking.forward(UID, X, timeout_s=5.0)
        await asyncio.sleep(11.0)
        servers.found = [replica(5)]
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 0
        assert servers.reads == 2
        assert by(await asking.forward(UID, X, timeout_s=5.0)) == 5

    scenario(1, run)


@pytest.mark.parametrize("lost", [NetworkError("broke"), ExpertOverloaded("full"), 1e9])
def test_a_backward_pass_without_an_answer_is_asked_for_again_at_the_same_server(lost: Behaviour) -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        answered = await asking.forward(UID, X, timeout_s=5.0)
        servers.behave[0] = [lost, 0.01]
        servers.asked.clear()
        await asking.backward(answered, UID, GradientPass(X, X), timeout_s=10.0)
        assert [number for number, _ in servers.asked] == [0, 0]
        assert servers.applied == {bytes(16)}

    scenario(3, run)


@pytest.mark.parametrize("final", [ExpertFailed("failed"), ExpertMissing("gone"), ExpertRefused("wrong"), ExpertApplied("applied")])
def test_what_would_not_help_is_not_repeated(final: SwarmError) -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        answered = await asking.forward(UID, X, timeout_s=5.0)
        servers.behave[0] = [final]
        servers.asked.clear()
        with pytest.raises(type(final)):
            await asking.backward(answered, UID, GradientPass(X, X), timeout_s=10.0)
        assert len(servers.asked) == 1

    scenario(1, run)


def test_a_backward_pass_ends_by_its_deadline() -> None:
    async def run(servers: Servers, asking: Asking) -> None:
        answered = await asking.forward(UID, X, timeout_s=5.0)
        servers.behave[0] = [1e9]
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await asking.backward(answered, UID, GradientPass(X, X), timeout_s=10.0)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(10.0, abs=0.2)

    scenario(1, run)
