"""A relay fails in the middle of an all-reduce of peers that reach each other only through relays."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.chaos.namespaces import Internet, Process, missing
from tests.chaos.reach_peers import entry_point

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# Rounds of 8 MB: seconds, at the 50 Mbit/s of a relay.
BYTES_MIN = 4_000_000  # that the relay carries of a round
AVERAGER = """
import hashlib, json, sys, torch, swarm
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
with swarm.Node(bootstrap=sys.argv[3:], listen="0.0.0.0:4000") as node:
    node.at_announced(lambda: show(event="relays", count=len(node.contact.relays)))
    sys.stdin.readline()
    tensor = torch.zeros(2_000_000)
    with swarm.Averager(node, [tensor], target_group_size=3, min_group_size=3) as averager:
        show(event="ready")
        for line in sys.stdin:
            tensor.fill_(float(sys.argv[1]))
            show(event="begun")
            result = averager.step(timeout_s=float(sys.argv[2]), round_key=int(line))
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            show(event="round", failed=result.failed, detail=result.detail, seconds=result.seconds["total"],
                 accused=len(result.accused), values=sorted(set(tensor.tolist()))[:9], digest=digest)
"""
ROUND_S_MAX = 120.0
PART = 0.4  # of the bytes of a round that the relay carries before it is lost


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_relay_lost_in_the_middle_of_an_all_reduce_costs_at_most_that_round(
    is_killed: bool, internet: Internet
) -> None:
    relay, address = entry_point(internet, "r")
    entry_point(internet, "s", address)
    peers = []
    for number in range(3):
        internet.behind_router(f"p{number}", "symmetric")
        value, limit_s = str(3.0 * number), str(ROUND_S_MAX)
        peers.append(internet.start(f"p{number}", "-c", AVERAGER, value, limit_s, address))
    for peer in peers:
        peer.wait("relays", lambda event: event["event"] == "relays" and event["count"] == 2)
        peer.tell("open")
    for peer in peers:
        peer.wait("averager", lambda event: event["event"] == "ready")

    before = internet.received_bytes("r")
    quiet = averaged(peers, 0)
    assert [one["values"] for one in quiet] == [[3.0]] * 3, quiet
    between = internet.received_bytes("r")
    assert between - before > BYTES_MIN
    begin(peers, 1)
    while internet.received_bytes("r") - between < PART * (between - before):
        time.sleep(0.01)
    relay.send(signal.SIGKILL if is_killed else signal.SIGSTOP)
    broken = outcomes(peers, 1)
    # A connection that is cut is replaced in the round. A frozen relay is noticed after seconds: members give
    # each other up before, and the round may fail.
    failed = {number for number, one in enumerate(broken) if one["failed"]}
    assert not failed or not is_killed, broken
    assert not any(one["accused"] for one in broken), broken  # losses are not treated as lies
    for number, one in enumerate(broken):
        if number in failed:
            assert one["values"] == [3.0 * number]
        else:  # parts of the average may lack the values of those whose connection was lost
            assert set(one["values"]) <= {0.0, 1.5, 3.0, 4.5, 6.0}
    assert len({one["digest"] for number, one in enumerate(broken) if number not in failed}) <= 1, broken
    after = averaged(peers, 2)
    assert not any(one["failed"] for one in after), after
    assert [one["values"] for one in after] == [[3.0]] * 3, after
    # nobody waits for peers that gave up behind the lost relay until the deadline
    assert max(one["seconds"] for one in after) < ROUND_S_MAX / 2, (quiet, broken, after)


def averaged(peers: Sequence[Process], number: int) -> list[dict[str, Any]]:
    """Let peers hold a round, and return how it has ended for each."""
    begin(peers, number)
    return outcomes(peers, number)


def begin(peers: Sequence[Process], number: int) -> None:
    """Let peers begin a round."""
    for peer in peers:
        peer.tell(str(number))


def outcomes(peers: Sequence[Process], number: int) -> list[dict[str, Any]]:
    """Wait until a round is over, and return how it has ended for each peer."""

    def rounds(peer: Process) -> list[dict[str, Any]]:
        return [event for event in peer.events if event["event"] == "round"]

    for peer in peers:
        peer.wait(f"end of round {number}", lambda _, of=peer: len(rounds(of)) > number, 180.0)
    return [rounds(peer)[number] for peer in peers]
