"""A run that the swarm has forgotten is published again by any former member, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.node import Node
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore

HERE = "127.0.0.1:0"


def specification() -> RunSpecification:
    return RunSpecification.from_table(
        {
            "name": "tiny",
            "members": "open",
            "target_batch_size": 64,
            "batch_size": 8,
            "task": {"name": "bytelm"},
        },
        "test",
    )


def directory(node: Node, folder: Path | None = None) -> RunDirectory:
    return RunDirectory(
        node.dht.service, clock=node.clock, store=SpecificationStore(folder) if folder else None
    )


async def _renew_once(where: RunDirectory, run: SignedSpecification) -> None:
    """Renew the specification until it is in the DHT and on disk."""

    async def on_newer(newer: SignedSpecification) -> None:
        raise AssertionError("there is no newer one")

    renewing = asyncio.create_task(where.renew(run, on_newer))
    while True:
        await asyncio.sleep(0.01)
        assert not renewing.done()
        with contextlib.suppress(PeerError):
            await where.specification(run.run_id, from_disk=False)
            if await where.stored(run.run_id):
                break
    renewing.cancel()


def test_a_former_member_publishes_a_forgotten_run_again(tmp_path: Path) -> None:
    """Only an entry point of the swarm is left, which does not know the run."""
    with Node(listen=HERE) as founder:
        run, _ = founder.network.run(
            create_run(directory(founder), specification(), founder.identity, founder.clock), 30.0
        )
        with Node(bootstrap=founder.addresses, listen=HERE) as member:
            assert member.wait_joined(10)
            member.network.run(_renew_once(directory(member, tmp_path), run), 30.0)
    with Node(listen=HERE) as entry, Node(bootstrap=entry.addresses, listen=HERE) as again:
        assert again.wait_joined(10)
        with pytest.raises(UsageError, match="announces no run"):
            again.network.run(directory(again).find("tiny"), 30.0)
        with pytest.raises(UsageError, match="announces no run"):
            again.network.run(directory(again, tmp_path).find(None), 30.0)
        for wanted in ("tiny", run.run_id, f"tiny@{run.run_id}"):
            assert again.network.run(directory(again, tmp_path).find(wanted), 30.0) == run
        again.network.run(_renew_once(directory(again, tmp_path), run), 30.0)
        with Node(bootstrap=entry.addresses, listen=HERE) as stranger:
            assert stranger.wait_joined(10)
            assert stranger.network.run(directory(stranger).find(None), 30.0) == run


def test_a_run_that_is_created_again_has_a_higher_version_than_stored_copies(tmp_path: Path) -> None:
    owner = Identity.generate()
    SpecificationStore(tmp_path).save(sign(specification(), owner, version=4, created_s=0.0))
    with Node(listen=HERE, identity=owner) as node:
        run, new = node.network.run(
            create_run(directory(node, tmp_path), specification(), owner, node.clock), 30.0
        )
        assert (run.version, new) == (5, True)
        assert run.created_s > 0.0


def test_a_former_member_joins_a_run_by_name_when_no_peer_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A former member continues alone. A peer that never took part gets an error."""
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with Node(listen=HERE) as gone:
        address = gone.addresses[0]
    command = ["join", address, "--yes", "--json", "--device", "cpu"]
    assert main([*command, "--run", "tiny"]) == 1
    assert "nobody answers at" in capsys.readouterr().err
    # requires CUDA, so that the command ends when it has found the run
    table = {**specification().table(), "requirements": {"device": "cuda"}}
    run = sign(RunSpecification.from_table(table, "test"), Identity.generate(), version=1, created_s=0.0)
    SpecificationStore(tmp_path / "runs").save(run)
    assert main([*command, "--run", "tiny"]) == 2
    captured = capsys.readouterr()
    assert "is trained on CUDA devices only" in captured.err
    notices = [
        event["text"] for event in map(json.loads, captured.out.splitlines()) if event["event"] == "notice"
    ]
    assert any("training alone with the specification stored on this machine" in text for text in notices)
    assert main(command) == 1, "without its name no run is taken from the disk"
