"""Local networks without internet, in network namespaces: runs are found by mDNS, and again by their name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.namespaces import Internet, Process, missing
from tests.wire.small_run import write_small_run

pytestmark = [pytest.mark.network_namespaces, pytest.mark.skipif(bool(missing()), reason=missing())]

# Announces a run, and prints what it finds itself after each line of input.
ANNOUNCER = """
import asyncio, json, sys
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.lan import LanPresence, browse
from swarm.net.logic.lan import NearbyPeer
async def main():
    peer = NearbyPeer(contact=Contact(PeerId(bytes([int(sys.argv[1])]) * 32)), run_id="a" * 20,
                      run_name=sys.argv[2], is_invited=False, who="\\x1b[2Jeve")
    presence = LanPresence(peer, Address("0.0.0.0", 4000))
    task = asyncio.create_task(presence.run())
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        runs = await browse()
        names = {one.name: [peer.contact.addresses[0].host for peer in one.peers] for one in runs}
        who = [one.peers[0].who for one in runs]
        print(json.dumps({"event": "found", "runs": names, "who": who}), flush=True)
    task.cancel()
    await presence.close()
    print(json.dumps({"event": "closed"}), flush=True)
asyncio.run(main())
"""

# Sends an answer of mDNS with this record to an address whenever it is told to.
FORGER = """
import json, socket, struct, sys
host, record = sys.argv[1], bytes.fromhex(sys.argv[2])
name = lambda text: b"".join(bytes([len(one)]) + one.encode() for one in text.split(".") if one) + b"\\0"
service, own = name("_p2p._udp.local."), name(sys.argv[3] + "._p2p._udp.local.")
packet = struct.pack("!6H", 0, 0x8400, 0, 2, 0, 0)
packet += service + struct.pack("!HHIH", 12, 1, 4500, len(own)) + own
packet += own + struct.pack("!HHIH", 16, 0x8001, 4500, len(record)) + record
for line in sys.stdin:
    # another port each time: the system shares unicast datagrams among the sockets by their sender
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(packet, (host, 5353))
    print(json.dumps({"event": "sent"}), flush=True)
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a command of `swarm` on a host, with files of its own."""

    def start(internet: Internet, host: str, *arguments: str) -> Process:
        monkeypatch.setenv("SWARM_HOME", str(tmp_path / f"home of {host}"))
        return internet.start(host, "-m", "swarm.cli", *arguments, "--json", "--exit-with-parent")

    return start


def epochs(process: Process, peers: int) -> int:
    return sum(event["event"] == "epoch" and event["peers"] == peers for event in process.events)


def test_three_peers_of_a_network_without_internet_find_each_other_and_train(
    internet: Internet, tmp_path: Path, homes: Any
) -> None:
    internet.lan("a", "b", "c")
    run = write_small_run(tmp_path, 'members = "open"\n')
    founder = homes(internet, "a", "start", str(run), "--device", "cpu", "--name", "desk")
    founder.wait("start", lambda event: event["event"] == "joined")
    listed = homes(internet, "b", "join")
    found = listed.wait("run nearby", lambda event: event["event"] == "nearby")
    assert (found["run"], found["members"], found["peers"][0]["who"]) == ("small", "open", "desk")
    others = [homes(internet, name, "join", "--yes", "--device", "cpu") for name in ("b", "c")]
    for process in (founder, *others):
        process.wait("rounds of three", lambda _, of=process: epochs(of, 3) >= 3)
    digests: dict[int, set[str]] = {}
    for process in (founder, *others):
        for event in process.events:
            if event["event"] == "epoch" and event["digest"]:
                digests.setdefault(event["epoch"], set()).add(event["digest"])
    assert digests
    assert all(len(one) == 1 for one in digests.values())


def test_a_volunteer_joins_again_by_the_name_of_its_run(
    internet: Internet, tmp_path: Path, homes: Any
) -> None:
    internet.lan("a", "b", "c")
    run = write_small_run(tmp_path, 'members = "open"\n')
    founder = homes(internet, "a", "start", str(run), "--device", "cpu", "--no-lan")
    address = founder.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    founder.wait("start", lambda event: event["event"] == "joined")
    first = homes(internet, "b", "join", address, "--yes", "--device", "cpu", "--no-lan")
    first.wait("rounds of two", lambda _: epochs(first, 2) >= 1)
    first.kill()
    again = homes(internet, "b", "join", "small", "--yes", "--device", "cpu", "--no-lan")
    again.wait("rounds of two", lambda _: epochs(again, 2) >= 1)
    unheard = homes(internet, "c", "join", "--yes")
    error = unheard.wait("error", lambda event: event["event"] == "error")
    assert "no run was found on the local network" in error["text"]


def test_answers_from_elsewhere_and_addresses_elsewhere_are_not_believed(internet: Internet) -> None:
    from swarm.core.ids import Address, Contact, PeerId
    from swarm.net.logic.lan import NearbyPeer, encode

    public, far = internet.public("a"), internet.public("far")
    here, beside = internet.lan("a", "b")
    watcher = internet.start("a", "-c", ANNOUNCER, "1", "true")
    near = internet.start("b", "-c", ANNOUNCER, "2", "near")

    def forged(name: str, host: str) -> str:
        contact = Contact(PeerId(bytes([9]) * 32), (Address(host, 4000),))
        peer = NearbyPeer(contact=contact, run_id="b" * 20, run_name=name, is_invited=False)
        return encode(peer).hex()

    senders = [
        internet.start("far", "-c", FORGER, public, forged("from-elsewhere", beside), "from-elsewhere"),
        internet.start("b", "-c", FORGER, here, forged("at-elsewhere", far), "at-elsewhere"),
        internet.start("b", "-c", FORGER, here, forged("forged-here", beside), "forged-here"),
    ]
    near.tell("")
    near.wait("answer", lambda event: event["event"] == "found")  # until both announce
    seen: dict[str, list[str]] = {}
    while "forged-here" not in seen:
        watcher.tell("")
        for _ in range(15):
            for sender in senders:
                sender.tell("")
                sender.wait("datagram", lambda event: not event.get("seen"))["seen"] = True
        answer = watcher.wait("answer", lambda event: event["event"] == "found" and not event.get("seen"))
        answer["seen"], seen = True, answer["runs"]
    assert "from-elsewhere" not in seen
    assert "at-elsewhere" not in seen
    assert seen["near"] == [beside]
    assert all("\x1b" not in who for who in answer["who"])
    near.end_input()
    near.wait("end", lambda event: event["event"] == "closed")
    watcher.tell("")
    after = watcher.wait("answer", lambda event: event["event"] == "found" and not event.get("seen"))
    assert "near" not in after["runs"]
