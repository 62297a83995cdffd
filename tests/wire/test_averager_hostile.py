"""Hostile members of `swarm.Averager`'s groups, between real nodes on loopback: what is clipped, outvoted,
audited and named.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.kernels import ReductionKernels
from averaging.averager import Averager
from averaging.reduction.reduce import Contribution
from averaging.reduction.robust import Aggregation
from averaging.result import RoundResult
from swarm.core.errors import UsageError
from swarm.node import Node
from tests.wire.some_nodes import nodes_of

NODES = 4
NUMEL = 20_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small vector be several chunks."""
    small = functools.partial(RoundConfig, chunk_bytes=8192)
    monkeypatch.setattr("averaging.averager.RoundConfig", small)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with nodes_of(NODES) as made:
        yield made


def step(
    nodes: Sequence[Node], values: Sequence[float], name: str, timeout_s: float = 20.0, **settings: Any
) -> list[RoundResult]:
    """One round in which every node contributes a constant vector; afterwards each tensor is in
    `settings["out"]`, if given.
    """
    out = settings.pop("out", [])
    tensors = [torch.full((NUMEL,), value) for value in values]
    averagers = [
        Averager(node, [tensor], name=name, **settings) for node, tensor in zip(nodes, tensors, strict=True)
    ]
    try:
        with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
            futures = [pool.submit(averager.step, timeout_s=timeout_s) for averager in averagers]
            results = [future.result(timeout_s + 10.0) for future in futures]
    finally:
        for averager in averagers:
            averager.close()
    out += tensors
    return results


def test_a_median_resists_a_hostile_peer_and_clipping_names_it(nodes: list[Node]) -> None:
    after: list[torch.Tensor] = []
    results = step(
        nodes,
        [1.0, 1.5, 2.0, -1e4],
        "outvoted",
        aggregation="median",
        clip_to_median=10.0,
        audit=0.5,
        out=after,
    )
    assert not any(result.failed for result in results), results
    assert len({result.digest for result in results}) == 1
    assert all(torch.equal(tensor, torch.full((NUMEL,), 1.25)) for tensor in after)
    assert all(result.clipped == {nodes[3].peer_id: 1.0} for result in results)
    assert not any(result.accused for result in results)


def test_a_lying_reducer_is_named_and_left_behind(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = ReductionKernels.reduce_one

    def lie(self: ReductionKernels, chunk: Any, contributions: list[Contribution], scratch: Any) -> Any:
        if self.vector.element(chunk.start) == 7.0:  # the liar's own
            contributions = [
                Contribution(item.place, item.weight, bytes(len(item.values))) for item in contributions
            ]
        return reduce(self, chunk, contributions, scratch)

    monkeypatch.setattr(ReductionKernels, "reduce_one", lie)
    after: list[torch.Tensor] = []
    *honest, lied = step(nodes[:3], [1.0, 2.0, 7.0], "audited", timeout_s=8.0, audit=1.0, out=after)
    liar = nodes[2].peer_id
    assert lied.failed
    for result, tensor in zip(honest, after, strict=False):
        assert not result.failed, result  # retried without the member that was proved dishonest
        assert set(result.peers) == {nodes[0].peer_id, nodes[1].peer_id}
        assert torch.equal(tensor, torch.full((NUMEL,), 1.5))
    accused = {peer_id: text for result in honest for peer_id, text in result.accused.items()}
    assert accused.keys() == {liar}
    assert "not what its senders' signed values give" in accused[liar]
    assert not lied.accused


def test_peers_with_another_aggregation_do_not_meet(nodes: list[Node]) -> None:
    with Averager(nodes[0], [torch.zeros(5)], name="differ", aggregation="median") as one:
        for settings in (
            {},
            {"aggregation": "median", "clip_to_median": 5.0},
            {"aggregation": "median", "audit": 0.1},
        ):
            mine = [torch.zeros(5)]
            with Averager(nodes[1], mine, name="differ", **settings) as other:  # type: ignore[arg-type]
                assert other.schema.digest != one.schema.digest
        with Averager(nodes[1], [torch.zeros(5)], name="differ", aggregation="median") as same:
            assert same.schema == one.schema
    with pytest.raises(UsageError, match="there is: mean, trimmed_mean, median, centered_clip"):
        Averager(nodes[0], [torch.zeros(5)], name="unknown", aggregation="krum")
    with pytest.raises(UsageError, match="audit is a share"):
        Averager(nodes[0], [torch.zeros(5)], name="unknown", audit=2.0)
    trimmed = Aggregation(rule="trimmed_mean", trim=0.4)
    with Averager(nodes[0], [torch.zeros(5)], name="trim", aggregation=trimmed) as averager:
        assert "trim 0.4" in averager.schema.text
