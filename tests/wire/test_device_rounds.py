"""Rounds over tensors on a device, between real nodes on loopback: which threads wait for it, and what
happens when its memory is full.

`LateQueue` stands in for the device, over tensors on the host.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from averaging.allreduce.allreduce import RoundMemory
from averaging.allreduce.config import EXCHANGE, RoundConfig
from averaging.averager import Averager, AveragerConfig
from averaging.matchmaking.logic.matchmaking import Matchmaker
from averaging.matchmaking.logic.messages import Answer, LookForGroup
from averaging.reduction import devices
from averaging.reduction.averages import ResultBuffer
from averaging.reduction.feedback import Feedback
from averaging.reduction.lowrank import PowerSgd
from averaging.reduction.staging import Staging
from averaging.reduction.vector import HOST
from averaging.result import RoundResult
from swarm.compression import find
from swarm.core.presets import WAN
from swarm.net.rpc import Stream
from swarm.node import Node
from swarm.testing.devices import HostReads, LateQueue
from tests.wire.event_loop import run_on_loop
from tests.wire.round_peers import make_group, peers
from tests.wire.some_nodes import nodes_of

NODES = 3
ROUNDS = 3
SHAPES = [(60, 200), (5000,), (30, 300)]
CHUNKS_MIN = 20
STEP_S = 60.0
# Members may leave, so a group of two may begin; it waits for the third, however late a busy machine runs it.
PATIENT_S = 15.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with nodes_of(NODES) as made:
        yield made


@dataclass
class Peers:
    """An averager on each node, whose tensors lie on a device of its own."""

    nodes: list[Node]
    averagers: list[Averager]
    tensors: list[list[torch.Tensor]]
    queues: list[LateQueue]

    def fill(self, seed: int) -> list[torch.Tensor]:
        """New values for everybody; their mean."""
        chance = torch.Generator().manual_seed(seed)
        for mine in self.tensors:
            for tensor in mine:
                tensor.copy_(torch.randn(tensor.shape, generator=chance))
        return [torch.stack([mine[nth] for mine in self.tensors]).mean(dim=0) for nth in range(len(SHAPES))]

    def step(self, **settings: Any) -> list[RoundResult]:
        with concurrent.futures.ThreadPoolExecutor(NODES, thread_name_prefix="trainer") as pool:
            steps = [pool.submit(averager.step, timeout_s=STEP_S, **settings) for averager in self.averagers]
            return [step.result(STEP_S + 10.0) for step in steps]

    def step_after(self, first: int, monkeypatch: pytest.MonkeyPatch) -> list[RoundResult]:
        """One round in which all others have heard that the member at `first` looks for a group before they
        look themselves: a group does not wait for a member that the round before left out.
        """
        own, heard, all_heard = self.nodes[first].peer_id, set[int](), threading.Event()
        on_query = Matchmaker.on_query

        def noted(matchmaker: Matchmaker, query: LookForGroup, now_s: float) -> Answer:
            answer = on_query(matchmaker, query, now_s)
            if query.contact.peer_id == own:
                heard.add(id(matchmaker))
            if len(heard) == NODES - 1:
                all_heard.set()
            return answer

        with monkeypatch.context() as patched:
            patched.setattr(Matchmaker, "on_query", noted)
            pending = self.averagers[first].step(timeout_s=STEP_S, wait=False)
            assert all_heard.wait(STEP_S)
            others = [
                averager.step(timeout_s=STEP_S, wait=False)
                for averager in self.averagers
                if averager is not self.averagers[first]
            ]
            results = [one.result(STEP_S + 10.0) for one in others]
            results.insert(first, pending.result(STEP_S + 10.0))
            return results

    def background(self, move: Callable[[], None]) -> list[RoundResult]:
        """A delayed round: training continues, and the difference is added when the result is taken."""
        pending = [averager.step(timeout_s=STEP_S, wait=False, apply="delta") for averager in self.averagers]
        move()
        return [one.result(STEP_S + 10.0) for one in pending]

    @contextlib.contextmanager
    def reads(self) -> Iterator[list[HostReads]]:
        """Return the calls on the tensors that the network threads made meanwhile."""
        watches = [HostReads(mine) for mine in self.tensors]
        self.on_network_threads(lambda place: watches[place].__enter__())
        try:
            yield watches
        finally:
            self.on_network_threads(lambda place: watches[place].__exit__(None, None, None))

    def on_network_threads(self, function: Callable[[int], Any]) -> list[Any]:
        async def call(place: int) -> Any:
            return function(place)

        return [node.network.run(call(place), 10.0) for place, node in enumerate(self.nodes)]


@contextlib.contextmanager
def party(nodes: list[Node], monkeypatch: pytest.MonkeyPatch, name: str, **settings: Any) -> Iterator[Peers]:
    made: list[LateQueue] = []

    def late(device: torch.device) -> LateQueue:
        made.append(LateQueue(device))
        return made[-1]

    monkeypatch.setattr(devices, "queue_of", late)
    tensors = [[torch.zeros(shape) for shape in SHAPES] for _ in nodes]
    # never inline on a device, whatever is asked for
    rounds = RoundConfig(chunk_bytes=2048)
    monkeypatch.setattr("averaging.averager.RoundConfig", lambda **options: replace(rounds, **options))
    monkeypatch.setattr("averaging.averager.DECLARE_S", STEP_S)
    monkeypatch.setattr("averaging.matchmaking.logic.grace_period.MARGIN_S", PATIENT_S)
    for node in nodes:
        node.timings = replace(WAN, query_timeout_s=PATIENT_S, unknown_peer_s=PATIENT_S)
    config = AveragerConfig(grace_s_max=PATIENT_S)
    settings = {"min_group_size": NODES, "target_group_size": NODES, **settings}
    with contextlib.ExitStack() as stack:
        averagers = [
            stack.enter_context(Averager(node, mine, name=name, config=config, **settings))
            for node, mine in zip(nodes, tensors, strict=True)
        ]
        yield Peers(nodes, averagers, tensors, made)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8-with-error-feedback": {"codec": "int8", "error_feedback": True},
    "audited": {"audit": 1.0},
    "median": {"aggregation": "median"},
    "powersgd": {"strategy": PowerSgd(rank=2)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_thread_neither_waits_for_a_device_nor_pins_memory_and_no_trainer_waits(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with party(nodes, monkeypatch, f"waits-{kind}", **KINDS[kind]) as there:
        loops = set(there.on_network_threads(lambda place: threading.current_thread().name))
        with there.reads() as reads:
            for seed in range(ROUNDS):
                mean = there.fill(seed)
                results = there.step() if seed else there.background(lambda: None)
                assert not any(result.failed for result in results), results
                assert len({result.digest for result in results}) == 1
                for mine in there.tensors:
                    if kind not in ("median", "powersgd"):
                        assert all(
                            torch.allclose(one, other, atol=0.1)
                            for one, other in zip(mine, mean, strict=True)
                        )
                    assert all(
                        torch.allclose(one, other, atol=1e-5)
                        for one, other in zip(mine, there.tensors[0], strict=True)
                    )
        for queue in there.queues:
            assert queue.waits
            assert not loops & set(queue.waits)
            assert not loops & set(queue.host_allocations)
            assert all("pool" in name for name in queue.waits), "nor does the trainer wait"
        assert [read.found for read in reads] == [[]] * NODES


@pytest.mark.parametrize("kind", ["plain", "int8-with-error-feedback"])
def test_the_trainer_waits_for_no_device_and_pinned_memory_is_used_again(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with party(nodes, monkeypatch, f"trainer-{kind}", **KINDS[kind]) as there:
        for seed in range(2 * ROUNDS):
            mean = there.fill(seed)
            if seed % 2:
                results = there.step()
            else:
                moved = [tensor for mine in there.tensors for tensor in mine]
                results = there.background(
                    lambda moved=moved: [tensor.add_(1.0) for tensor in moved] and None
                )  # type: ignore[misc]
                mean = [tensor + 1.0 for tensor in mean]
            assert not any(result.failed for result in results), results
            for mine in there.tensors:
                assert all(
                    torch.allclose(one, other, atol=0.1) for one, other in zip(mine, mean, strict=True)
                )
        for queue in there.queues:
            assert all("pool" in name for name in queue.waits), "neither landing nor staging waits"
            assert queue.fetches
            assert len(queue.host_allocations) < CHUNKS_MIN < len(queue.fetches) / ROUNDS, (
                "not for every chunk, nor in every round"
            )
            # of the last round: nobody waited for them yet
            assert CHUNKS_MIN <= len(queue.uploaded) < 2 * len(queue.fetches) / ROUNDS
            queue.finish_uploads()  # nothing was changed while it was being copied


def test_a_value_that_cannot_be_sent_is_looked_at_in_the_pool(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with party(nodes, monkeypatch, "not-a-number") as there:
        loops = set(there.on_network_threads(lambda place: threading.current_thread().name))
        there.fill(1)
        for tensor in there.tensors[1]:
            tensor[0] = float("nan")  # in chunks that it reduces itself, and in others
        with there.reads() as reads:
            results = there.step()
        assert not any(result.failed for result in results), results
        assert "is nan" in results[0].left_out[nodes[1].peer_id]
        assert [read.found for read in reads] == [[]] * NODES
        assert not any(loops & set(queue.waits) for queue in there.queues)


def test_a_dead_reducers_shard_is_taken_over_without_a_wait_on_the_loop() -> None:
    config, victim = RoundConfig(chunk_bytes=2048), 1

    async def main() -> None:
        async with peers(4) as members:
            group = make_group(members, codec="int8")
            stagings = [Staging([torch.randn(40_000)], devices.Queues([HOST], LateQueue)) for _ in members]
            queues = [staging.queues.of(HOST) for staging in stagings]
            feedback = [
                Feedback(40_000, find("int8"), cut=staging.cut, queues=staging.queues) for staging in stagings
            ]
            dead, enough = members[victim], asyncio.Event()
            dead.handlers.remove(EXCHANGE.name)

            async def stalling(stream: Stream) -> None:
                while await stream.receive() is not None:
                    enough.set()

            dead.handlers.stream(EXCHANGE, stalling)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        peer.allreduce.run(
                            group,
                            staging.take(read_in_place=True),
                            deadline_s=time.monotonic() + 20,
                            config=config,
                            memory=RoundMemory(ResultBuffer(staging.queues), fed_back),
                        )
                    )
                    for peer, staging, fed_back in zip(members, stagings, feedback, strict=True)
                ]
                await enough.wait()
                await dead.kill()
                survivors = [await task for place, task in enumerate(running) if place != victim]
                running[victim].cancel()
            assert [outcome.reason for outcome in survivors] == [None] * 3
            assert len({outcome.digest for outcome in survivors}) == 1
            assert all("while reducing" in outcome.left_out[dead.contact.peer_id] for outcome in survivors)
            for queue in queues:
                assert isinstance(queue, LateQueue)
                assert queue.waits
                assert threading.current_thread().name not in queue.waits + queue.host_allocations

    run_on_loop(main())


@pytest.mark.parametrize("kind", ["plain", "int8-with-error-feedback"])
@pytest.mark.parametrize("when", ["reserving", "first fetch", "later fetch"])
def test_a_member_without_memory_fails_alone_and_the_next_round_succeeds(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str, when: str
) -> None:
    with party(
        nodes, monkeypatch, f"memory-{kind}-{when}".replace(" ", "-"), min_group_size=2, **KINDS[kind]
    ) as there:
        there.fill(0)
        assert not any(result.failed for result in there.step())
        poor, queue = there.averagers[1], there.queues[1]
        before_held = _state_of(poor)
        there.fill(1)
        before = [tensor.clone() for tensor in there.tensors[1]]
        queue.memory, queue.slots_max = {
            "reserving": (None, 0),
            "first fetch": (0, None),
            "later fetch": (7, None),
        }[when]
        first, failed, last = there.step()
        assert (failed.failed, failed.reason) == (True, "memory")
        assert (
            failed.detail
            == f"peer {nodes[1].peer_id} ran out of memory on cuda:7 when it wanted 2.00 GiB more"
        )
        assert all(torch.equal(tensor, was) for tensor, was in zip(there.tensors[1], before, strict=True))
        assert queue.under_way == 0
        held = _state_of(poor)
        assert (held is None) == (before_held is None)
        assert held is None or torch.equal(held, before_held)  # type: ignore[arg-type]
        for result in (first, last):  # the others continued
            assert not result.failed, result
            assert nodes[1].peer_id in result.left_out or nodes[1].peer_id not in result.peers
        queue.memory = queue.slots_max = None
        mean = there.fill(2)
        results = there.step_after(1, monkeypatch)
        assert not any(result.failed for result in results), [
            (result.reason, result.detail, result.left_out, len(result.peers)) for result in results
        ]
        assert results[0].contributions == {node.peer_id: 1.0 for node in nodes}
        assert all(
            torch.allclose(one, other, atol=0.1) for one, other in zip(there.tensors[1], mean, strict=True)
        )


def _state_of(averager: Averager) -> torch.Tensor | None:
    feedback = averager.feedback
    return feedback.state_dict()["sender"] if isinstance(feedback, Feedback) else None


@pytest.mark.parametrize("method", ["take", "put", "add_difference"])
@pytest.mark.parametrize("waits", [True, False])
def test_no_memory_on_the_callers_thread_is_a_failed_result(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, method: str, waits: bool
) -> None:
    apply: Literal["delta", "replace"] = "delta" if method == "add_difference" else "replace"
    with party(nodes, monkeypatch, f"staging-{method.replace('_', '-')}-{waits}", min_group_size=2) as there:
        poor, *others = there.averagers
        original = getattr(Staging, method)

        def short(self: Staging, *args: Any, **named: Any) -> Any:
            if self.tensors[0] is there.tensors[0][0]:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has")
            return original(self, *args, **named)

        there.fill(1)
        before = [tensor.clone() for tensor in there.tensors[0]]

        def step(averager: Averager) -> RoundResult:
            return averager.step(timeout_s=STEP_S, apply=apply)

        with concurrent.futures.ThreadPoolExecutor(NODES) as pool:
            running = [pool.submit(step, averager) for averager in others]
            with monkeypatch.context() as patched:
                patched.setattr(Staging, method, short)
                result = (
                    step(poor)
                    if waits
                    else poor.step(timeout_s=STEP_S, apply=apply, wait=False).result(STEP_S)
                )
            assert (result.failed, result.reason, result.digest) == (True, "memory", "")
            assert (
                result.detail
                == "this peer ran out of memory on cuda:0 when it wanted 4.00 MiB more; its tensors are as "
                "they were"
            )
            assert all(torch.equal(tensor, was) for tensor, was in zip(there.tensors[0], before, strict=True))
            if method == "take":  # it failed before it looked for a group, so the others still wait for it
                assert not step(poor).failed
            assert not any(one.result(STEP_S).failed for one in running)
        there.fill(2)
        assert not any(one.failed for one in there.step(apply=apply))
