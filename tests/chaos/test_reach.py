"""Peers behind routers that translate addresses, in network namespaces: who can be called, and by whom rounds
are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.namespaces import Internet, Process, missing

pytestmark = [pytest.mark.network_namespaces, pytest.mark.skipif(bool(missing()), reason=missing())]

# Rounds of an averager with the settings that a user gets without asking.
AVERAGER = """
import json, sys, time, torch, swarm
def show(**event): print(json.dumps(event), flush=True)
with swarm.Node(bootstrap=sys.argv[3:]) as node:
    node.tell_reach(lambda sentence: show(event="reach", text=sentence, verdict=node.reach))
    show(event="listening", addresses=node.addresses, reach=node.reach)
    sys.stdin.readline()
    tensor = torch.zeros(1000)
    with swarm.Averager(node, [tensor], target_group_size=3, min_group_size=3) as averager:
        show(event="ready")
        sys.stdin.readline()
        for number in range(int(sys.argv[2])):
            tensor.fill_(float(sys.argv[1]))
            result = averager.step(timeout_s=60.0, round_key=number)
            show(event="round", failed=result.failed, detail=result.detail, peers=len(result.peers),
                 value=float(tensor[0]), seconds=result.seconds["total"])
        show(event="done")
        sys.stdin.readline()
"""
ROUNDS = 4


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def averager(internet: Internet, host: str, value: float, *bootstrap: str) -> Process:
    return internet.start(host, "-c", AVERAGER, str(value), str(ROUNDS), *bootstrap)


def address_of(process: Process) -> str:
    listening = process.wait("address", lambda event: event["event"] == "listening")
    return str(listening["addresses"][0])


def test_peers_behind_routers_average_with_a_public_one(internet: Internet) -> None:
    internet.public("r")
    for name in ("a", "b"):
        internet.behind_router(name)
    public = averager(internet, "r", 3.0)
    address = address_of(public)
    assert address.startswith("/ip4/44.")
    hidden = [averager(internet, name, value, address) for name, value in (("a", 6.0), ("b", 9.0))]
    for process in hidden:
        assert process.wait("start", lambda event: event["event"] == "listening")["addresses"] == []
        told = process.wait("verdict", lambda event: event["event"] == "reach")
        assert told["verdict"] == "hidden"
        assert "others cannot call this machine" in told["text"]
    everybody = [public, *hidden]
    for process in everybody:
        process.tell("open")
    for process in everybody:
        process.wait("averager", lambda event: event["event"] == "ready")
    for process in everybody:
        process.tell("average")
    for process in everybody:
        process.wait("end", lambda event: event["event"] == "done")
        rounds = [event for event in process.events if event["event"] == "round"]
        assert [(one["failed"], one["peers"], one["value"]) for one in rounds] == [(False, 3, 6.0)] * ROUNDS
