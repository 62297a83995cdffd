"""Runs over real sockets: a published run is found by other nodes, and `swarm join` explains why it cannot
join.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.node import Node
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory
from swarm.run.signed import specification_key
from swarm.run.specification import RunSpecification

HERE = "127.0.0.1:0"


@pytest.fixture
def founder() -> Iterator[Node]:
    with Node(listen=HERE) as node:
        yield node


def directory(node: Node) -> RunDirectory:
    return RunDirectory(node.dht.service, clock=node.clock)


def publish(node: Node, name: str = "tiny", **changes: object) -> str:
    table = {
        "name": name,
        "members": "open",
        "target_batch_size": 64,
        "batch_size": 8,
        "task": {"name": "bytelm"},
        **changes,
    }
    signed, _ = node.network.run(
        create_run(directory(node), RunSpecification.from_table(table, "test"), node.identity, node.clock),
        30.0,
    )
    return signed.run_id


def test_a_run_is_found_through_any_peer_after_its_creator_left() -> None:
    with Node(listen=HERE) as entry:
        with Node(bootstrap=entry.addresses, listen=HERE) as founder:
            assert founder.wait_joined(10)
            run_id = publish(founder)
            owner: PeerId = founder.peer_id
        with Node(bootstrap=entry.addresses, listen=HERE) as stranger:
            assert stranger.wait_joined(10)
            signed = stranger.network.run(directory(stranger).find(None), 30.0)
            assert (signed.run_id, signed.owner, signed.name) == (run_id, owner, "tiny")


def test_a_forged_specification_does_not_hide_the_valid_one(founder: Node) -> None:
    run_id = publish(founder)
    with Node(bootstrap=founder.addresses, listen=HERE) as attacker:
        assert attacker.wait_joined(10)
        forged, _ = attacker.network.run(
            create_run(
                directory(attacker),
                RunSpecification.from_table(_TABLE, "test"),
                attacker.identity,
                attacker.clock,
            ),
            30.0,
        )
        for value in (forged.blob, b"garbage"):
            with pytest.raises(UsageError, match="nothing but the run's signed specification"):
                attacker.dht.store(specification_key(run_id), value, ttl_s=60)
        assert founder.network.run(directory(founder).specification(run_id), 30.0).owner == founder.peer_id
        names = [listing.run_id for listing in founder.network.run(directory(founder).listings(), 30.0)]
        assert sorted(names) == sorted([run_id, forged.run_id])


_TABLE = {"name": "evil", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}


@pytest.mark.parametrize(
    ("changes", "options", "code", "sentence"),
    [
        ({}, ["--run", "other"], 2, "this swarm has no run 'other'. It has: tiny@"),
        ({"task": {"name": "poetry"}}, [], 2, "the task 'poetry' is not installed on this machine"),
        (
            {"requirements": {"memory_mb": 1 << 30}},
            [],
            1,
            "close other programs, or volunteer with a larger machine",
        ),
        ({"requirements": {"device": "cuda"}}, ["--device", "cpu"], 2, "is trained on CUDA devices only"),
    ],
)
def test_join_fails_with_one_sentence_when_the_volunteer_cannot_take_part(
    changes: dict[str, object],
    options: list[str],
    code: int,
    sentence: str,
    founder: Node,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(founder, **changes)
    assert main(["join", founder.addresses[0], "--yes", "--json", *options]) == code
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    assert json.loads(captured.out.splitlines()[-1])["text"] in captured.err


def test_join_fails_when_the_swarm_has_no_run(founder: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", founder.addresses[0], "--yes"]) == 2
    assert (
        "this swarm announces no run: create one with `swarm start RUN.toml --bootstrap ADDRESS`"
        in capsys.readouterr().err
    )


def test_the_run_event_is_complete_before_training_begins(
    founder: Node, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("too short")
    publish(founder)
    assert (
        main(["join", founder.addresses[0], "--yes", "--json", "--device", "cpu", "--data", str(tmp_path)])
        == 2
    )
    captured = capsys.readouterr()
    run = next(event for event in map(json.loads, captured.out.splitlines()) if event["event"] == "run")
    assert run["parameters"] > 200_000
    assert run["memory_bytes"] > 300_000_000
    assert run["round_bytes"] > 2 * run["parameters"]
    assert (run["peers"], run["traffic_bytes_per_hour"], run["version"]) == (0, None, 1)
    assert "holds too little text" in captured.err
