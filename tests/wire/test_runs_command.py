"""`swarm runs`: what a swarm lists, and what this machine remembers and gave."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swarm.cli.commands import swarm
from swarm.node import Node
from swarm.run import events
from swarm.run.catalogue import catalogue_key
from swarm.run.contributions import ContributionLog, Given
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore
from tests.wire.volunteers import TABLE, VolunteerThread, created_run


def listed(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(swarm, ["runs", "--no-lan", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_runs_of_a_swarm_are_listed_with_what_they_ask_for_and_how_many_train(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with created_run() as (node, _, signed):
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        (found,) = listed(node.addresses[0])
        assert (found["run"], found["id"], found["members"]) == ("tiny", signed.run_id, "open")
        assert (found["task"], found["peers"], found["problem"]) == ("bytelm", 1, "")
        assert str(found["asks"]).startswith("about ")
        assert node.dht.service.storage.usage(catalogue_key(signed.founder)).entries == 1
        text = CliRunner().invoke(swarm, ["runs", node.addresses[0], "--search", "BYTELM"]).stdout
        assert "asks for about" in text
        assert "1 volunteer at" in text
        assert [line["event"] for line in listed(node.addresses[0], "--search", "vision")] == ["notice"]
        one.stop.set()
        one.end()


def test_without_an_address_the_catalogue_of_remembered_peers_is_read(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with created_run() as (node, owner, signed):
        directory = RunDirectory(node.dht.service, clock=node.clock)
        specification = RunSpecification.from_table({**TABLE, "name": "other"}, "test")
        other, _ = node.network.run(create_run(directory, specification, owner, node.clock), 30.0)
        store = SpecificationStore(tmp_path / "runs")
        store.save(signed)
        (notice,) = (line for line in listed() if line["event"] == "notice")
        assert "remembers no peer of an open run" in str(notice["text"])
        with Node(bootstrap=node.addresses, listen=None) as earlier:
            assert earlier.wait_joined(10)
            earlier.book.keep_at(store.peers_file(signed.run_id))
        found = {line["run"]: line for line in listed()}
        assert found["tiny"]["event"] == "remembered"
        assert (found["other"]["event"], found["other"]["id"]) == ("run", other.run_id)
        assert [line["event"] for line in listed("--search", "OTHER")] == ["notice", "run"]
        assert len(listed("--search", "vision")) == 2, "neither remembered nor in the catalogue"
    *_, last = listed()
    assert "the catalogue was not read: nobody answers at" in str(last["text"])


def test_runs_that_this_machine_remembers_are_listed_with_what_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    assert [line["event"] for line in listed()] == ["notice", "notice"], "neither runs nor peers"
    with created_run() as (_, _, signed):
        SpecificationStore(tmp_path / "runs").save(signed)
    log = ContributionLog(tmp_path / "contributions.sqlite")
    log.add(date(2026, 11, 1), signed.full_name, Given(samples=1234, seconds=7200.0, sent_bytes=10**9))
    log.add(date(2026, 11, 2), "gone@abc", Given(samples=1))
    gave: list[tuple[object, Any]] = [(line["run"], line["given"]) for line in listed() if "run" in line]
    assert [(run, sums["samples"]) for run, sums in gave] == [("gone", 1), ("tiny", 1234)]
    text = CliRunner().invoke(swarm, ["runs", "--no-lan", "--search", "tiny"]).stdout
    assert "gave 1,234 samples in 2.0 h (1.0 GB sent, 0 bytes received)" in text
    (tmp_path / "contributions.sqlite").write_bytes(b"damaged" * 500)
    assert {line["event"] for line in listed()} == {"notice", "remembered"}


@pytest.mark.usefixtures("home")
def test_a_machine_without_runs_on_its_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def browse() -> list[Any]:
        return []

    monkeypatch.setattr("swarm.net.lan.browse", browse)
    text = CliRunner().invoke(swarm, ["runs"]).stdout
    assert "this machine remembers no run" in text
    assert "no run was found on the local network" in text
