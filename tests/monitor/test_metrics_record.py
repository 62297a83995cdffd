"""The record of a peer's metrics: it is read as written, records out of bounds are refused, and peers are
spread over its keys.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarm.core.errors import PeerError, UsageError
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import Record, encode_value
from swarm.metrics.record import SHARDS, Metrics, RoundReport, check_own, metrics_key, metrics_keys
from tests.monitor.watched_run import metrics, peer, round_report

RUN_ID = "a" * 20
FULL = metrics(
    1e9,
    name="anna",
    reach="direct",
    agent="swarm/0",
    samples=3,
    validation_loss=1.5,
    contributed_epoch=6,
    contributed_at_s=1e9 - 1,
    bytes_up=5,
    bytes_down=6,
    drift=0.1,
    head="12" * 8,
    line="34" * 8,
    epochs_given_up=3,
    rounds_done=2,
    rounds_failed=1,
    own={"accuracy": 0.5},
    broken=("loss",),
    rounds=(
        round_report(1e9),
        round_report(
            1e9,
            reason="deadline",
            detail="nobody came",
            left=((str(peer(1)), "gone"),),
            accused=((str(peer(2)), "lied"),),
        ),
    ),
)


def refusal(value: Any, shard: int = 0) -> str | None:
    writer = peer(1)
    record = Record(
        key=metrics_keys(RUN_ID)[shard],
        subkey=str(writer),
        value=encode_value(value),
        issued_at_us=10**15,
        expiration_us=10**15 + 8_000_000,
        writer=writer,
    )
    return Namespaces().refusal(record)


def test_a_record_is_read_as_it_was_written() -> None:
    assert Metrics.decode(FULL.encode()) == FULL
    bare = metrics(1e9, loss=None, device="")
    assert Metrics.decode(bare.encode()) == bare
    assert refusal(FULL.encode()) is refusal(bare.encode()) is None


def test_the_longest_possible_record_fits() -> None:
    blame = tuple((str(peer(place)), "y" * 1000) for place in range(1, 20))
    rounds = tuple(
        round_report(
            1e9,
            detail="x" * 1000,
            reason="z" * 99,
            left=blame,
            accused=blame,
            group="0" * 64,
            digest="0" * 64,
        )
        for _ in range(9)
    )
    own = {f"m{'x' * 28}{place:02}": 1.0 for place in range(16)}
    longest = metrics(
        1e9,
        name="n" * 99,
        device="d" * 99,
        agent="a" * 99,
        own=own,
        broken=tuple(own),
        rounds=rounds,
        head="0" * 64,
        line="0" * 64,
        epochs_given_up=1 << 40,
    )
    assert refusal(longest.encode()) is None
    (newest, *_) = reversed(Metrics.decode(longest.encode()).rounds)
    assert len(newest.left) == len(newest.accused) == 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rate": math.inf}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"epoch": 1.5}, "epoch"),
        ({"loss": math.nan}, "loss"),
        ({"name": "x" * 41}, "name"),
        ({"name": 3}, "name"),
        ({"own": {f"m{place}": 1.0 for place in range(17)}}, "own"),
        ({"own": {"x" * 33: 1.0}}, "own"),
        ({"own": {"x": math.nan}}, "own"),
        ({"own": [1]}, "own"),
        ({"rounds": [{}]}, "rounds"),
        ({"rounds": [round_report(1e9).encode()] * 5}, "rounds"),
        ({"up": 1 << 61}, "up"),
        ({"head": b"x" * 9}, "head"),
        ({"line": "text"}, "line"),
        ({"given_up": -1}, "given_up"),
    ],
)
def test_a_record_out_of_bounds_is_refused_by_replicas_and_readers(change: dict[str, Any], word: str) -> None:
    value = {**FULL.encode(), **change}
    with pytest.raises(PeerError, match=word):
        Metrics.decode(value)
    assert word in str(refusal(value))


def test_control_characters_do_not_reach_a_terminal() -> None:
    nasty = "a\x1b[2J\u202eb\n"
    read = Metrics.decode(
        {
            **FULL.encode(),
            "name": nasty,
            "device": nasty,
            "rounds": [{**round_report(1e9).encode(), "x": nasty, "r": "r"}],
        }
    )
    assert read.name == read.device == read.rounds[0].detail == "a[2Jb"


def test_peers_are_spread_over_the_keys() -> None:
    keys = [metrics_key(RUN_ID, peer(number)) for number in range(1, 500)]
    assert set(keys) == set(metrics_keys(RUN_ID))
    assert max(keys.count(key) for key in set(keys)) < 4 * 500 / SHARDS


def test_own_metrics_are_numbers_with_names() -> None:
    import torch

    assert check_own("accuracy", 1, ()) == 1.0
    assert check_own("accuracy", torch.tensor(0.25), ()) == 0.25
    assert check_own("accuracy", math.nan, ()) is None
    assert check_own("accuracy", 10**400, ()) is None
    for name, value in (
        ("1st", 1.0),
        ("", 1.0),
        ("x" * 33, 1.0),
        ("ok", "text"),
        ("ok", None),
        ("ok", torch.zeros(2)),
    ):
        with pytest.raises(UsageError):
            check_own(name, value, ())
    with pytest.raises(UsageError, match="at most 16"):
        check_own("one_more", 1.0, [f"m{place}" for place in range(16)])


def test_texts_are_cut_when_they_are_encoded() -> None:
    made = RoundReport.decode(
        round_report(1e9, reason="round", detail="x" * 999, digest="d" * 64, group="e" * 64).encode()
    )
    assert (len(made.detail), len(made.digest), len(made.group)) == (160, 16, 16)
