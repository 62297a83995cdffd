"""Tests of schemas, permitted writers, lifetimes and quotas, and of the rules for a run's own names with
values that runs write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.optim.progress.logic.reports import PEERS_MAX, ProgressReport
from swarm.core.errors import UsageError
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import Record, Value, encode_value
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.run_rules import RUN_RULES
from swarm.dht.logic.schema import Binary, Flag, Many, Number, RecordSchema, Table, Text

ANN, BOB = PeerId(b"a" * 32), PeerId(b"b" * 32)


def record(key: str, value: Value, writer: PeerId = ANN, ttl_s: float = 60.0, **changes: Any) -> Record:
    found = Key.parse(key)
    subkey = str(writer) if found.namespace.startswith("run.") else None
    made = Record(
        key=found,
        subkey=subkey,
        value=encode_value(value),
        issued_at_us=0,
        expiration_us=int(ttl_s * 1e6),
        writer=writer,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (Flag(), [True, False], [0, 1, None, "true"]),
        (Number(0, 10), [0, 10, 2.5], [-1, 11, float("nan"), float("inf"), True, "1", None]),
        (Number(0, 10, whole=True), [0, 10], [2.0, 2.5, True]),
        (Text(3), ["", "abc", "äöü"], ["abcd", b"abc", 1]),
        (Binary(3, 1), [b"a", b"abc"], [b"", b"abcd", "abc"]),
        (Many(Number(0, 1), 2), [[], [0, 1]], [[0, 0, 0], [2], (), "ab", {}]),
        (Table({"a": Flag()}), [{"a": True}, {"a": False, "c": 9, 4: 5}], [{}, {"b": True}, {"a": 1}, []]),
        (Table({}, {"b": Text(1)}), [{}, {"b": "x"}], [{"b": "xx"}, {"b": None}]),
        (Table({}, keys_max=2), [{}, {1: 1, 2: 2}], [{1: 1, 2: 2, 3: 3}]),
    ],
)  # fmt: skip
def test_a_schema_accepts_good_values_and_refuses_bad_ones(
    schema: RecordSchema, good: list[Value], bad: list[Value]
) -> None:
    assert [schema.refusal(value) for value in good] == [None] * len(good)
    assert all(schema.refusal(value) for value in bad)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=_VALUES)
def test_a_schema_handles_any_value(value: Value) -> None:
    for rules in RUN_RULES:
        if rules.schema is not None:
            assert rules.schema.refusal(value) is None or isinstance(rules.schema.refusal(value), str)


def test_a_record_must_pass_every_matching_rule_and_other_names_are_open() -> None:
    namespaces = Namespaces()
    assert namespaces.refusal(record("scores/x", object.__name__)) is None
    namespaces.register("scores", NamespaceRules(writers=frozenset({ANN})))
    namespaces.register("scores", NamespaceRules(name="final.*", schema=Number(0, 1), ttl_s_max=10))
    assert namespaces.refusal(record("scores/x", "anything")) is None
    assert "is not among those who may write scores/x" in (
        namespaces.refusal(record("scores/x", 1, BOB)) or ""
    )
    assert "is not among" in (
        namespaces.refusal(replace(record("scores/x", 1, BOB), deleted=True, value=b"")) or ""
    ), "tombstones too"
    assert namespaces.refusal(record("scores/final.1", 0.5, ttl_s=10)) is None
    assert "under scores/final.1 the value is not within 0 and 1" in (
        namespaces.refusal(record("scores/final.1", 2, ttl_s=10)) or ""
    )
    assert "lives at most 10 s" in (namespaces.refusal(record("scores/final.1", 1, ttl_s=11)) or "")
    assert (
        namespaces.refusal(replace(record("scores/final.1", 0, ttl_s=3600), deleted=True, value=b"")) is None
    )
    assert namespaces.refusal(record("scoresheet/final.1", "x", BOB)) is None
    namespaces.register("scores", NamespaceRules())
    assert namespaces.refusal(record("scores/x", 1, BOB)) is None, "the rule of the same pattern is replaced"
    namespaces.register(
        "own", NamespaceRules(subkey_is_writer=True, value_bytes_max=10, entries_per_writer_max=3)
    )
    assert "its writer's PeerID" in (namespaces.refusal(record("own/x", 1, subkey="y")) or "")
    assert "at most 10 bytes" in (namespaces.refusal(record("own/x", "x" * 20, subkey=str(ANN))) or "")
    assert namespaces.entries_per_writer_max(Key.parse("own/x")) == 3
    assert namespaces.entries_per_writer_max(Key.parse("other/x")) is None
    assert namespaces.entries_max(Key.parse("own/x")) is None
    assert namespaces.entries_max(Key.parse("run.abc/progress")) == PEERS_MAX, "as many as readers keep"
    assert namespaces.entries_max(Key.parse("run.abc/progress.3.1")) == PEERS_MAX


def test_invalid_rules_are_refused_with_a_reason() -> None:
    for wrong in (
        {"name": ""},
        {"value_bytes_max": 0},
        {"ttl_s_max": 90_000.0},
        {"entries_per_writer_max": 0},
        {"entries_max": 0},
        {"entries_max": 5000},
    ):
        with pytest.raises(UsageError):
            NamespaceRules(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Namespaces().register("a/b", NamespaceRules())


def test_run_rules_accept_values_that_members_write_and_refuse_others() -> None:
    namespaces = Namespaces()
    addresses = ["/ip4/203.0.113.7/tcp/4000/tls/http"]
    report = ProgressReport(epoch=3, samples=100, rate=2.5, at_s=1.8e9, since_s=1.8e9)
    good = {
        "progress": {**report.encode(), "addresses": addresses},
        "holders.gradients": {"addresses": addresses, "schema": b"s" * 32, "text": "3 tensors"},
        "donors": {"epoch": 3, "canonical": True, "digest": b"", "bytes": 1 << 30, "addresses": addresses},
        "presence": [1, "anything small"],
        "something-new": {"open": bytes(20_000)},
    }
    for name, value in good.items():
        assert namespaces.refusal(record(f"run.abc/{name}", value)) is None, name
        later = {**value, "of a newer version": 1} if isinstance(value, dict) else value
        assert namespaces.refusal(record(f"run.abc/{name}", later)) is None, name
    wrong_fields: list[dict[str, Value]] = [
        {"samples": -1},
        {"rate": float("inf")},
        {"addresses": ["x" * 400]},
    ]
    bad: dict[str, list[Value]] = {
        "progress": [{}, 7, *({**report.encode(), **wrong} for wrong in wrong_fields)],
        "holders.gradients": [
            {"addresses": addresses},
            {"addresses": [addresses], "schema": b"", "text": ""},
            bytes(100),
        ],
        "donors": [
            {"epoch": 1 << 50, "addresses": addresses},
            {"epoch": 1, "addresses": addresses * 9},
            None,
        ],
        "presence": [bytes(5000)],
    }
    for name, values in bad.items():
        for value in values:
            assert namespaces.refusal(record(f"run.abc/{name}", value)), (name, value)
        assert "lives at most 3600 s" in (
            namespaces.refusal(record(f"run.abc/{name}", good[name], ttl_s=7200)) or ""
        )
        assert namespaces.entries_per_writer_max(Key.parse(f"run.abc/{name}")) == 1
