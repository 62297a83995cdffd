"""`swarm contributors` of a run that two volunteers train: what each gave, also after one has left."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from swarm.cli.commands import swarm
from swarm.node import Node, NodeConfig
from swarm.run import events
from swarm.run.contributions import ContributionLog, Given
from tests.wire.volunteers import HERE, VolunteerThread, created_run

ROUNDS = 20  # more than between two receipts


def listed(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(swarm, ["contributors", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_both_volunteers_are_listed_with_what_they_gave_and_stay_listed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    named = NodeConfig(name="kitchen\x1b[31m")
    with (
        created_run() as (node, _, signed),
        Node(bootstrap=node.addresses, listen=HERE, config=named) as other,
    ):
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = VolunteerThread(other, signed, new=False, data=texts)
        place = 0
        for _ in range(ROUNDS):
            place = one.wait(events.EpochDone, lambda event: event.peers == 2, since=place) + 1
        given = two.wait(events.EpochDone, lambda event: event.peers == 2)
        assert given
        *found, summary, limit = listed(node.addresses[0])
        assert {line["peer_id"] for line in found} == {str(node.peer_id), str(other.peer_id)}
        assert all(isinstance(line["samples"], int) and line["samples"] > 0 for line in found)
        assert [line["place"] for line in found] == [1, 2]
        assert "by 2 peers" in str(summary["text"])
        assert "a peer counts for at most 10 times the median" in str(limit["text"])
        text = CliRunner().invoke(swarm, ["contributors", node.addresses[0]]).stdout
        assert "\x1b" not in text

        before = {line["peer_id"]: line["samples"] for line in found}
        two.stop.set()
        two.end()
        one.wait(events.EpochDone, lambda event: event.peers in (0, 1), since=place)
        *after, _, _ = listed(node.addresses[0])
        samples = {line["peer_id"]: line["samples"] for line in after}
        gone = str(other.peer_id)
        assert isinstance(samples[gone], int)
        assert isinstance(before[gone], int)
        assert samples[gone] >= before[gone]
        one.stop.set()
        one.end()


def test_a_run_of_pairs_has_no_totals_and_says_what_this_machine_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with created_run(mode={"name": "gossip"}) as (node, _, signed):
        (nothing,) = listed(node.addresses[0])
        assert str(nothing["text"]).endswith("so nobody signs what they gave")
        log = ContributionLog(tmp_path / "contributions.sqlite")
        log.add(date(2026, 11, 1), signed.full_name, Given(samples=1234, seconds=7200.0))
        (own,) = listed(node.addresses[0])
    assert "mode gossip" in str(own["text"])
    assert "This machine's own count: 1,234 samples in 2.0 h" in str(own["text"])
