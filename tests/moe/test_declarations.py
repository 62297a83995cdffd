"""The rules of declarations, and how free places are chosen."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moe.protocol.declarations import NAMESPACE, RULES, Declarations, ServerLoad
from moe.protocol.names import ExpertGrid, ExpertUid
from moe.server.places import choose_places, first_places
from swarm.core.errors import UsageError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import Record, encode_value
from swarm.dht.logic.rules import NamespaceRules

A = bytes(16)  # a schema's digest
GOOD: dict[str, Any] = {
    "addresses": ["/ip4/10.0.0.1/tcp/4000/tls/http"],
    "deeper": [1],
    "schemas": [A],
    "experts": [[2]],
    "wait": 0.0,
    "rate": 1.0,
    "busy": 0.5,
}


@pytest.mark.parametrize(
    "change",
    [
        {"deeper": [-1]},
        {"deeper": [4096]},
        {"deeper": [1.5]},
        {"deeper": [*range(4096), 1]},
        {"experts": [[True]]},
        {"schemas": [b"short"]},
        {"schemas": [A] * 65},
        {"addresses": ["x" * 301]},
        {"addresses": ["x"] * 9},
        {"wait": -1.0},
        {"wait": float("nan")},
        {"rate": "fast"},
        {"busy": 1.5},
        {"experts": None},
    ],
)
def test_malformed_declarations_are_refused_by_the_rules(change: dict[str, Any]) -> None:
    namespaces = Namespaces()
    namespaces.register(NAMESPACE, RULES)
    writer = PeerId(bytes(32))

    def record(value: Any, subkey: str | None = None) -> Record:
        return Record(
            key=Key(NAMESPACE, "ffn"),
            subkey=subkey or str(writer),
            value=encode_value(value),
            issued_at_us=0,
            expiration_us=10**6,
            writer=writer,
        )

    assert namespaces.refusal(record(GOOD)) is None
    assert namespaces.refusal(record(GOOD | change)) is not None
    assert namespaces.refusal(record(GOOD, "somebody else")) is not None


class NoDht:
    """A DHT that only registers rules."""

    def register(self, namespace: str, rules: NamespaceRules) -> None:
        assert (namespace, rules) == (NAMESPACE, RULES)


def test_too_many_schemas_below_one_prefix_are_refused() -> None:
    experts = {ExpertUid("ffn", (number,)): number.to_bytes(16, "big") for number in range(65)}
    with pytest.raises(UsageError, match="64 schemas"):
        Declarations(NoDht(), Contact, experts, ServerLoad)  # type: ignore[arg-type]


def test_places_that_nobody_hosts_are_drawn_first_and_no_expert_is_hosted_twice() -> None:
    grid, rng = ExpertGrid.parse("ffn.[0:2].[0:3]"), random.Random(1)
    own, other = PeerId(bytes(32)), PeerId(b"\1" * 32)
    names = list(grid.names())
    load = {uid: {other: 0.0} if uid in names[:3] else {} for uid in names}
    assert choose_places([grid], load, own, 3, rng) == names[3:]
    assert choose_places([grid], load, own, 6, rng) == names
    assert set(choose_places([grid], load, other, 3, rng)) == set(names[3:])
    with pytest.raises(UsageError, match="has 6 experts, and 4 are asked for"):
        choose_places([grid], load, other, 4, rng)
    huge = ExpertGrid.parse("ffn.[0:4096].[0:4096]")
    assert len(set(choose_places([huge], {}, own, 16, rng))) == 16
    assert choose_places([huge], {}, own, 16, random.Random(2)) != choose_places(
        [huge], {}, own, 16, random.Random(3)
    )


def test_places_are_chosen_among_all_patterns_of_a_grid() -> None:
    """Regression: a grid of several patterns could only be hosted as a whole, or one pattern of it."""
    patterns, rng = [ExpertGrid.parse("attention.[0:2]"), ExpertGrid.parse("ffn.[0:4]")], random.Random(1)
    own, other = PeerId(bytes(32)), PeerId(b"\1" * 32)
    names = [uid for pattern in patterns for uid in pattern.names()]
    load = {uid: {} if uid in names[1:3] else {other: 0.0} for uid in names}
    assert choose_places(patterns, load, own, 2, rng) == names[1:3]
    assert choose_places(patterns, load, own, 6, rng) == names
    with pytest.raises(
        UsageError, match=r"attention\.\[0:2\], ffn\.\[0:4\] has 6 experts, and 7 are asked for"
    ):
        choose_places(patterns, load, own, 7, rng)
    huge = [*patterns, ExpertGrid.parse("huge.[0:4096].[0:4096]")]
    assert len(set(choose_places(huge, {}, own, 16, rng))) == 16


@pytest.mark.parametrize("saved", [False, True], ids=["without-checkpoints", "with-checkpoints"])
def test_a_server_that_was_killed_takes_its_experts_again(saved: bool) -> None:
    """Regression: its declarations from before, which live for 45 s, kept it from its own experts. A server
    of the whole grid was told to choose fewer.
    """
    grid, rng = ExpertGrid.parse("ffn.[0:4]"), random.Random(1)
    own, other = PeerId(bytes(32)), PeerId(b"\1" * 32)
    names = list(grid.names())
    load = {uid: {own: 0.5} if uid in names[:2] else {other: 0.9} for uid in names}
    kept = names[:2] if saved else []
    assert first_places([grid], load, own, 2, kept, rng) == names[:2]
    assert first_places([grid], load, own, 4, kept, rng) == names
    assert first_places([grid], {uid: {other: 0.9} for uid in names}, own, 4, kept, rng) == names


def test_a_server_of_a_huge_grid_takes_the_experts_of_its_checkpoints_again() -> None:
    """Regression: if it had all of its experts, it was told that the grid has hardly any free places."""
    grid, own = ExpertGrid.parse("ffn.[0:4096].[0:4096]"), PeerId(bytes(32))
    saved = [ExpertUid("ffn", (number, number)) for number in range(3)]
    assert first_places([grid], {}, own, 3, saved, random.Random(1)) == saved
    assert set(first_places([grid], {}, own, 4, saved, random.Random(1))) > set(saved)
