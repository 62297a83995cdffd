"""`swarm.Averager` between real nodes on loopback, all in this process."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.averager import Averager, AveragerConfig
from averaging.result import RoundResult
from averaging.service import AveragingService
from swarm.core.errors import DeadlineExceeded, UsageError
from swarm.node import Node
from tests.wire.some_nodes import nodes_of

NODES = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with nodes_of(NODES) as made:
        yield made


class Party:
    """One averager of the same name on each of some nodes."""

    def __init__(
        self, nodes: list[Node], name: str, tensors: Callable[[int], list[torch.Tensor]], **settings: Any
    ) -> None:
        self.tensors = [tensors(index) for index in range(len(nodes))]
        self.averagers = [
            Averager(node, mine, name=name, **{"codec": "float32", **settings})
            for node, mine in zip(nodes, self.tensors, strict=True)
        ]

    def step(self, each: Callable[[int], dict[str, Any]] = lambda index: {}) -> list[RoundResult]:
        """Everybody steps at once, each in a thread of its own."""
        with concurrent.futures.ThreadPoolExecutor(len(self.averagers)) as pool:
            futures = [
                pool.submit(averager.step, **{"timeout_s": 20.0, **each(index)})
                for index, averager in enumerate(self.averagers)
            ]
            return [future.result(30.0) for future in futures]

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        for averager in self.averagers:
            averager.close()


def fine(results: list[RoundResult]) -> None:
    assert not any(result.failed for result in results), results
    assert len({result.digest for result in results}) == 1
    assert len({result.group_id for result in results}) == 1


def test_weighted_averages_are_exact_whatever_the_tensors_look_like(nodes: list[Node]) -> None:
    def tensors(index: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return [
            torch.randn(1000, generator=generator),
            torch.empty(0, 3),
            torch.randn(7, 11, generator=generator).t(),
            torch.tensor(float(index)),
            torch.randn(3, dtype=torch.float64, generator=generator).to(torch.bfloat16),
            torch.randn(300_001, generator=generator),
        ]

    with Party(nodes, "exact", tensors) as party:
        before = [[tensor.clone() for tensor in mine] for mine in party.tensors]
        weights = [1.0, 2.0, 0.5, 4.5]
        results = party.step(lambda index: {"weight": weights[index], "gather": {"loss": index * 1.5}})
        fine(results)
        for place, tensor in enumerate(party.tensors[0]):
            expected = sum(weights[index] * before[index][place].double() for index in range(NODES)) / sum(
                weights
            )
            tolerance = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-6
            assert torch.allclose(tensor.double(), expected, rtol=tolerance, atol=tolerance)
            assert all(torch.equal(tensor, mine[place]) for mine in party.tensors)
        for result in results:
            assert set(result.peers) == {node.peer_id for node in nodes}
            assert result.contributions == {node.peer_id: 1.0 for node in nodes}
            assert result.gathered == {
                node.peer_id: {"loss": index * 1.5} for index, node in enumerate(nodes)
            }
            assert result.left_out == {}
            assert result.attempts == 1
            assert result.bytes_sent > 0
            assert {"staging", "matchmaking", "all_reduce", "write_back", "total"} <= set(result.seconds)


@pytest.mark.parametrize("apply", ["replace", "delta"])
def test_small_and_large_tensors_have_codecs_of_their_own(nodes: list[Node], apply: str) -> None:
    def choose(name: str, tensor: torch.Tensor) -> str:
        return "int8" if tensor.numel() > 10_000 else "float32" if name.startswith("norm") else "float16"

    tensors = [
        {
            "layer": torch.randn(50_000, generator=torch.Generator().manual_seed(index)),
            "bias": torch.full((10,), 1.0 + index),
            "norm.weight": torch.full((3, 4), 1e-6 * (index + 1)).t(),
            "empty": torch.empty(0),
            "other": torch.randn(20_000, generator=torch.Generator().manual_seed(10 + index)).half(),
        }
        for index in range(3)
    ]
    before = [{name: tensor.clone() for name, tensor in mine.items()} for mine in tensors]
    with ExitStack() as stack:
        averagers = [
            stack.enter_context(Averager(node, mine, name=f"mixed-{apply}", codec=choose))
            for node, mine in zip(nodes, tensors, strict=False)
        ]
        assert averagers[0].schema.codec == "float16+float32+int8"
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            steps = [pool.submit(one.step, 1.0 + n, 20.0, apply=apply) for n, one in enumerate(averagers)]
            results = [step.result(30.0) for step in steps]
        fine(results)
        assert all(set(result.contributions.values()) == {1.0} for result in results)
        # each contributor sends about two thirds of each vector twice
        encoded = 70_000 * 1.0 + 10 * 2 + 12 * 4
        assert all(0.8 < result.bytes_sent / (encoded * 4 / 3) < 1.3 for result in results), results
    for name, bound in (("layer", 0.03), ("bias", 2e-3), ("norm.weight", 1e-12), ("other", 0.03)):
        expected = sum((1.0 + n) * before[n][name].double() for n in range(3)) / 6.0
        for mine in tensors:
            torch.testing.assert_close(mine[name].double(), expected, rtol=0.0, atol=bound)
    if apply == "replace":
        assert all(torch.equal(tensors[0][name], mine[name]) for mine in tensors for name in mine)


def test_peers_that_choose_other_codecs_do_not_meet(nodes: list[Node]) -> None:
    with (
        Averager(nodes[0], [torch.ones(4)], name="other-codecs", codec=lambda name, tensor: "int8"),
        Averager(nodes[1], [torch.ones(4)], name="other-codecs", codec=lambda name, tensor: "int4") as other,
    ):
        result = other.step(timeout_s=5.0)
        assert result.failed
        assert "1 tensors in int8" in result.detail


@pytest.mark.timing
def test_a_group_smaller_than_its_target_forms_at_once(nodes: list[Node]) -> None:
    with Party(
        nodes[:3], "smaller", lambda index: [torch.full((4,), float(index))], target_group_size=8
    ) as party:
        fine(party.step())
        times = []
        for _ in range(5):
            results = party.step()
            fine(results)
            assert all(len(result.peers) == 3 for result in results)
            times.append(max(result.seconds["matchmaking"] for result in results))
        assert sorted(times)[2] < 0.5


@pytest.mark.timing
def test_rounds_follow_one_another(nodes: list[Node]) -> None:
    with Party(nodes, "rounds", lambda index: [torch.full((4,), float(index))]) as party:
        for number in range(8):
            results = party.step(lambda index, number=number: {"round_key": number})  # type: ignore[misc]
            fine(results)
            assert len(results[0].peers) == NODES
        late = party.averagers[0].step(round_key=3, timeout_s=10.0)
        assert (late.failed, late.reason) == (True, "passed")
        assert late.seconds["total"] < 1.0


def test_more_peers_than_a_group_takes_form_two(nodes: list[Node]) -> None:
    with Party(nodes, "two", lambda index: [torch.full((4,), float(index))], target_group_size=2) as party:
        results = party.step()
        assert not any(result.failed for result in results), results
        assert sorted(len(result.peers) for result in results) == [2] * 4
        assert len({result.group_id for result in results}) == 2


def test_rounds_to_mix_make_a_swarm_larger_than_a_group_exact(nodes: list[Node]) -> None:
    weights = [1.0, 2.0, 0.5, 4.5]
    with Party(
        nodes,
        "grid",
        lambda index: [torch.full((4,), float(index)), torch.arange(9.0) * index],
        target_group_size=2,
    ) as party:
        mean = sum(weight * index for index, weight in enumerate(weights)) / sum(weights)
        results = party.step(lambda index: {"weight": weights[index], "round_key": 0})
        assert not any(result.failed for result in results), results
        assert {averager.rounds_to_mix for averager in party.averagers} == {2}
        assert abs(sum(result.weight for result in results) - sum(weights)) < 1e-9
        results = party.step(lambda index: {"weight": results[index].weight, "round_key": 1})
        assert not any(result.failed for result in results), results
        assert len({result.group_id for result in results}) == 2
        assert {result.weight for result in results} == {sum(weights) / NODES}
        for first, second in party.tensors:
            torch.testing.assert_close(first, torch.full((4,), mean), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(second, torch.arange(9.0) * mean, rtol=1e-6, atol=1e-6)


@pytest.mark.timing
def test_a_lone_peer_gets_a_result_at_once(nodes: list[Node]) -> None:
    tensor = torch.arange(4.0)
    with Averager(nodes[0], [tensor], name="alone") as averager:
        averager.step()
        took_s = []
        for _ in range(5):  # on a loaded machine any single one may take long
            began_s = time.monotonic()
            result = averager.step(timeout_s=30.0)
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < 0.5
    assert (result.failed, result.reason, result.attempts) == (True, "alone", 0)
    assert torch.equal(tensor, torch.arange(4.0))


@pytest.mark.timing
def test_different_tensors_are_named(nodes: list[Node]) -> None:
    with (
        Averager(nodes[0], [torch.zeros(4)], name="schema"),
        Averager(nodes[1], [torch.zeros(5)], name="schema") as other,
    ):
        began_s = time.monotonic()
        result = other.step(timeout_s=20.0)
        assert time.monotonic() - began_s < 2.0
    assert (result.failed, result.reason) == (True, "schema")
    assert nodes[0].peer_id.short in result.detail
    assert "1 tensors with 4 elements" in result.detail


def test_weight_zero_receives_only_and_an_auxiliary_only_helps(nodes: list[Node]) -> None:
    with Party(nodes[:3], "zero", lambda index: [torch.full((4,), float(index + 1))]) as party:
        own = torch.full((4,), 9.0)
        helper = Averager(nodes[3], [own], name="zero", codec="float32", auxiliary=True)
        party.averagers.append(helper)
        results = party.step(lambda index: {"weight": 0.0 if index == 1 else 1.0})
        assert not any(result.failed for result in results), results
        assert all(torch.equal(mine[0], torch.full((4,), 2.0)) for mine in party.tensors)
        assert nodes[1].peer_id not in results[0].contributions
        assert torch.equal(own, torch.full((4,), 9.0))


def test_shards_follow_bandwidths_that_users_have_set(nodes: list[Node]) -> None:
    """As measured ones they would count as equal, and the slowest peer would take a third longer."""
    speeds = (0.44e6, 0.33e6, 0.22e6)
    with ExitStack() as stack:
        averagers = [
            stack.enter_context(
                Averager(
                    node,
                    [torch.randn(100_000)],
                    name="set-speeds",
                    codec="float32",
                    config=AveragerConfig(bandwidth=speed),
                )
            )
            for node, speed in zip(nodes, speeds, strict=False)
        ]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda averager: averager.step(timeout_s=20.0), averagers))
        fine(results)
        # of three contributors each sends what it does not reduce, and its shard to two others: 1 + shard
        sent = [result.bytes_sent / 400_000 for result in results]
        assert sent[2] == pytest.approx(1.0, rel=0.02), "the slowest reduces nothing"
        assert sent[0] / speeds[0] == pytest.approx(sent[1] / speeds[1], rel=0.02)


def test_a_step_fails_when_nobody_contributes(nodes: list[Node]) -> None:
    with Party(nodes[:2], "nobody", lambda index: [torch.full((4,), float(index))]) as party:
        results = party.step(lambda index: {"weight": 0.0})
        assert [result.reason for result in results] == ["nobody contributes"] * 2
        assert [mine[0][0].item() for mine in party.tensors] == [0.0, 1.0]


def test_a_delta_is_applied_in_the_background(nodes: list[Node]) -> None:
    with Party(nodes[:2], "delta", lambda index: [torch.full((4,), float(index))]) as party:
        pending = party.averagers[0].step(wait=False, apply="delta")
        with pytest.raises(DeadlineExceeded):
            pending.result(0.01)
        with pytest.raises(UsageError, match="in progress"):
            party.averagers[0].step()
        party.tensors[0][0] += 100.0  # training continues
        assert not party.averagers[1].step().failed
        result = pending.result(10.0)
        assert not result.failed
        assert pending.done
        assert torch.equal(party.tensors[0][0], torch.full((4,), 100.5))
        assert pending.result() is result
        assert torch.equal(party.tensors[0][0], torch.full((4,), 100.5))


def test_a_cancelled_round_changes_nothing_and_frees_the_averager(nodes: list[Node]) -> None:
    with Party(nodes[:2], "cancel", lambda index: [torch.full((4,), float(index))]) as party:
        pending = party.averagers[1].step(wait=False)
        pending.cancel()
        result = pending.result(5.0)
        assert (result.failed, result.reason) == (True, "cancelled")
        assert torch.equal(party.tensors[1][0], torch.full((4,), 1.0))
        fine(party.step())


def test_a_broken_round_is_retried_with_the_remaining_peers(nodes: list[Node]) -> None:
    bootstrap = nodes[0].addresses
    guest = Node(bootstrap=bootstrap, listen="127.0.0.1:0")
    size = 4_000_000
    with Party(nodes[:2], "broken", lambda index: [torch.full((size,), float(index))]) as party:
        doomed = Averager(guest, [torch.full((size,), 50.0)], name="broken", codec="float32")
        leaving = doomed.step(wait=False)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(averager.step, timeout_s=20.0) for averager in party.averagers]
            while not guest.service(AveragingService).all_reduce.running and not leaving.done:
                time.sleep(0.001)
            # as when a process dies: every connection of its is gone
            guest.network.run(guest.channels.close(), 5.0)
            guest.close()
            results = [future.result(30.0) for future in futures]
    fine(results)
    if results[0].attempts == 2:  # it usually is in the middle of the round
        assert str(guest.peer_id) in results[0].detail
        assert all(torch.equal(mine[0], torch.full((size,), 0.5)) for mine in party.tensors)


@pytest.mark.timing
def test_peers_notice_a_closed_averager(nodes: list[Node]) -> None:
    with Party(nodes[:3], "goodbye", lambda index: [torch.full((4,), float(index))]) as party:
        fine(party.step())
        party.averagers.pop().close()
        results = party.step()
        fine(results)
        assert len(results[0].peers) == 2
        assert max(result.seconds["matchmaking"] for result in results) < 0.5


def test_averagers_of_one_node_average_independently(nodes: list[Node]) -> None:
    with (
        Party(nodes[:2], "left", lambda index: [torch.full((4,), float(index))]) as left,
        Party(nodes[:2], "right", lambda index: [torch.full((4,), 10.0 + index)]) as right,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        for future in [pool.submit(left.step), pool.submit(right.step)]:
            fine(future.result(30.0))
        assert left.tensors[0][0][0] == 0.5
        assert right.tensors[0][0][0] == 10.5
        with pytest.raises(UsageError, match="already has an averager 'left'"):
            Averager(nodes[0], [torch.zeros(1)], name="left")


def test_wrong_use_raises_a_usage_error(nodes: list[Node]) -> None:
    for settings, words in [
        (
            {"aggregation": "krum"},
            "no aggregation 'krum'; there is: mean, trimmed_mean, median, centered_clip",
        ),
        ({"clip_to_median": 0.5}, "clip_to_median"),
        ({"codec": "float12"}, "float12"),
        ({"min_group_size": 5}, "min_group_size"),
        ({"min_fraction": 0.0}, "min_fraction"),
        ({"name": "a/b"}, "name"),
    ]:
        with pytest.raises(UsageError, match=words):
            Averager(nodes[0], [torch.zeros(1)], **settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bandwidth"):
        AveragerConfig(bandwidth=0.0)
    with pytest.raises(UsageError, match="grace_s_max"):
        AveragerConfig(grace_s_max=-1.0)
    averager = Averager(nodes[0], [torch.zeros(1)], name="wrong")
    for arguments, words in [
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"gather": object()}, "msgpack"),
        ({"gather": b"x" * 20_000}, "at most"),
        ({"apply": "sideways"}, "apply"),
    ]:
        with pytest.raises(UsageError, match=words):
            averager.step(**arguments)
    assert averager.step().reason == "alone"  # nothing of that has left it unusable
    averager.close()
    averager.close()
    with pytest.raises(UsageError, match="closed"):
        averager.step()


def test_wrong_choices_of_codecs_raise_a_usage_error(nodes: list[Node]) -> None:
    tensors = [torch.ones(4)]
    for options, complaint in [
        ({"codec": lambda name, tensor: "int1"}, "there is no codec 'int1'"),
        ({"codec": lambda name, tensor: 8}, "returns the name of a codec"),
        ({"codec": lambda name, tensor: "int8", "error_feedback": True}, "need one codec"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            Averager(nodes[0], tensors, name="wrong", **options)


def test_a_closed_node_is_a_usage_error() -> None:
    with Node(listen="127.0.0.1:0") as node:
        averager = Averager(node, [torch.zeros(1)])
        pending = averager.step(wait=False)
    assert pending.result(5.0).reason in ("closed", "alone")
    with pytest.raises(UsageError, match="closed"):
        averager.step()
    with pytest.raises(UsageError, match="closed"):
        Averager(node, [torch.zeros(1)])
    averager.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_value_that_cannot_be_sent_is_refused_at_the_sender_with_the_name_of_its_tensor(
    nodes: list[Node], named: bool
) -> None:
    tensors = [{"weight": torch.ones(3, 4), "bias": torch.ones(4)} for _ in range(3)]
    tensors[1]["bias"][2] = float("nan")
    averagers = [
        Averager(
            node,
            mine if named else list(mine.values()),
            name=f"nan {named}".replace(" ", "-"),
            target_group_size=3,
            min_group_size=3,
        )
        for node, mine in zip(nodes, tensors, strict=False)
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = [
            future.result(30.0)
            for future in [pool.submit(averager.step, timeout_s=20.0) for averager in averagers]
        ]
    fine(results)
    tensor = "'bias'" if named else "1"
    for result in results:  # it is told, and so are the others
        assert (
            f"element 2 of its tensor {tensor}, (4,), is nan, which float16 cannot carry"
            in result.left_out[nodes[1].peer_id]
        )
    assert torch.equal(tensors[0]["bias"], torch.ones(4))
    for averager in averagers:
        averager.close()
