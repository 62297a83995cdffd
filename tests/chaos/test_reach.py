"""Peers behind NAT routers, in network namespaces: which peers can be called, and which reduce."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.namespaces import Internet, Process, RouterKind, missing
from tests.chaos.reach_peers import PEER, call, contact_of, entry_point
from tests.chaos.reach_peers import peer as peer_behind
from tests.wire.small_run import write_small_run

pytestmark = [pytest.mark.network_namespaces, pytest.mark.skipif(bool(missing()), reason=missing())]

# Rounds of an averager with the settings that a user gets without asking.
AVERAGER = """
import json, sys, time, torch, swarm
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
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

# A node that says what it announces, and what is known about others, until its input ends.
NODE = """
import json, sys, swarm
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
with swarm.Node(bootstrap=sys.argv[2:], listen=sys.argv[1]) as node:
    node.tell_reach(lambda sentence: show(event="reach", verdict=node.reach, addresses=node.addresses))
    show(event="listening", addresses=node.addresses)
    for line in sys.stdin:
        contacts = [one.contact for one in node.peers()]
        known = {str(one.peer_id): [address.host for address in one.addresses] for one in contacts}
        show(event="known", peers=known)
show(event="closed")
"""

# Calls an expert by its name, from a node that takes no calls, and says what comes back.
CALLER = """
import json, sys, torch, swarm
with swarm.Node(bootstrap=sys.argv[2:], listen=None) as node:
    expert = swarm.RemoteExpert(node, sys.argv[1], forward_timeout_s=30.0)
    y = expert(torch.randn(4, 16, requires_grad=True))
    y.sum().backward()
    print(json.dumps({"event": "called", "shape": list(y.shape)}))
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def one_public_and_two_behind_routers(internet: Internet) -> None:
    internet.public("r")
    for name in ("a", "b"):
        internet.behind_router(name)


def averager(internet: Internet, host: str, value: float, *bootstrap: str) -> Process:
    return internet.start(host, "-c", AVERAGER, str(value), str(ROUNDS), *bootstrap)


def address_of(process: Process) -> str:
    listening = process.wait("address", lambda event: event["event"] == "listening")
    return str(listening["addresses"][0])


def test_peers_behind_routers_average_with_a_public_one(internet: Internet) -> None:
    one_public_and_two_behind_routers(internet)
    public = averager(internet, "r", 3.0)
    address = address_of(public)
    (announced,) = public.events[0]["addresses"]  # no loopback address
    assert announced.startswith("/ip4/44.")
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


def wait_until_known(process: Process, peer_id: str, host: str) -> None:
    """Wait until a node knows that this peer is at this host, and nowhere else."""
    while True:
        process.tell("")
        known = process.wait("peers", lambda event: event["event"] == "known" and not event.get("seen"))
        known["seen"] = True
        if known["peers"].get(peer_id) == [host]:
            return


def test_peers_whose_port_is_open_or_forwarded_announce_the_address_that_others_called(
    internet: Internet,
) -> None:
    internet.public("r")
    hosts = {"open": internet.public("open"), "forwarded": internet.behind_router("forwarded")}
    internet.forward("forwarded", 4000)
    first = internet.start("r", "-c", NODE, "0.0.0.0:4000")
    address = address_of(first)
    # They start while the network is down; otherwise they may be called before they print their announcement.
    internet.cut()
    processes = {name: internet.start(name, "-c", NODE, "0.0.0.0:4000", address) for name in hosts}
    for process in processes.values():
        assert process.wait("start", lambda event: event["event"] == "listening")["addresses"] == []
        reach = process.wait("first verdict", lambda event: event["event"] == "reach")
        assert (reach["verdict"], reach["addresses"]) == ("unknown", [])
        reach["seen"] = True
    internet.restore()
    for name, host in hosts.items():
        process = processes[name]
        reach = process.wait("verdict", lambda event: event["event"] == "reach" and not event.get("seen"))
        assert reach["verdict"] == "direct"
        (announced,) = reach["addresses"]
        assert announced.startswith(f"/ip4/{host}/tcp/4000/")
        wait_until_known(first, announced.rpartition("/")[2], host)


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd not installed")
def test_a_router_that_forwards_ports_on_request_makes_its_peer_callable(
    internet: Internet, tmp_path: Path
) -> None:
    internet.public("r")
    host = internet.behind_router("home")
    internet.forward_on_request("home", tmp_path)
    address = address_of(internet.start("r", "-c", NODE, "0.0.0.0:4000"))
    peer = internet.start("home", "-c", NODE, "0.0.0.0:4000", address)
    reach = peer.wait("verdict", lambda event: event["event"] == "reach")
    assert reach["verdict"] == "direct"
    (announced,) = reach["addresses"]
    assert announced.startswith(f"/ip4/{host}/tcp/4000/")
    assert internet.forwarded_on_request("home")
    peer.end_input()
    peer.wait("end", lambda event: event["event"] == "closed")
    assert not internet.forwarded_on_request("home")


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd not installed")
def test_a_peer_whose_router_forwards_ports_on_request_relays(internet: Internet, tmp_path: Path) -> None:
    internet.public("r")
    internet.behind_router("home")
    internet.forward_on_request("home", tmp_path)
    internet.behind_router("a", "symmetric")
    entry = command(internet, "r", "bootstrap", "--relay-mbit", "0")
    address = entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    relay = command(internet, "home", "bootstrap", "--bootstrap", address)
    peer_id = relay.wait("start", lambda event: event["event"] == "listening")["peer_id"]
    relay.wait("verdict", lambda event: "by UPnP" in event.get("text", ""))
    peer = internet.start("a", "-c", PEER, "0.0.0.0:4000", address)
    reached = peer.wait("relay", lambda event: "through relay" in event.get("text", ""))
    assert f"through relay {peer_id[-8:]}" in reached["text"]


def test_peers_with_ipv6_alone_announce_the_address_that_others_called(internet: Internet) -> None:
    hosts = {name: internet.public_ipv6(name) for name in ("r", "peer")}
    first = internet.start("r", "-c", NODE, "[::]:4000")
    address = address_of(first)
    assert address.startswith(f"/ip6/{hosts['r']}/tcp/4000/")
    peer = internet.start("peer", "-c", NODE, "[::]:4000", address)
    (announced,) = peer.wait("verdict", lambda event: event["event"] == "reach")["addresses"]
    assert announced.startswith(f"/ip6/{hosts['peer']}/tcp/4000/")
    wait_until_known(first, announced.rpartition("/")[2], hosts["peer"])


def test_peers_behind_firewalls_with_ipv6_alone_call_each_other_through_a_relay_and_then_directly(
    internet: Internet,
) -> None:
    host = internet.public_ipv6("r")
    entry = command(internet, "r", "bootstrap", "--listen", "[::]:4000")
    address = entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    peers, contacts = {}, {}
    for name in ("a", "b"):
        internet.behind_firewall(name)
        peers[name] = internet.start(name, "-c", PEER, "[::]:4000", address)
    for name, peer in peers.items():
        contacts[name] = contact_of(peer)
        assert contacts[name][1].startswith(f"/ip6/{host}/tcp/4001/p2p/")
    assert call(peers["a"], contacts["b"])["why"] == ""
    peers["a"].wait(
        "hole", lambda event: event["event"] == "log" and "is called directly" in event["text"], 30.0
    )
    entry.kill()
    assert call(peers["a"], contacts["b"])["why"] == ""


def test_a_peer_whose_address_changes_announces_the_new_one(internet: Internet) -> None:
    internet.public("r")
    host = internet.public("moving")
    first = internet.start("r", "-c", NODE, "0.0.0.0:4000")
    peer = internet.start("moving", "-c", NODE, "0.0.0.0:4000", address_of(first))
    (before,) = peer.wait("verdict", lambda event: event["event"] == "reach")["addresses"]
    assert before.startswith(f"/ip4/{host}/tcp/4000/")
    now = internet.readdress("moving", host)
    peer.wait("new address", lambda event: any(f"/ip4/{now}/tcp/4000/" in one for one in event["addresses"]))
    wait_until_known(first, before.rpartition("/")[2], now)


def test_a_machine_with_several_interfaces_announces_public_addresses_alone(internet: Internet) -> None:
    hosts = [internet.public("two"), internet.second_uplink("two")]
    internet.lan("two", "near")
    internet.public("r")
    first = internet.start("two", "-c", NODE, "0.0.0.0:4000")
    announced = first.wait("address", lambda event: event["event"] == "listening")["addresses"]
    assert [one.split("/")[2] for one in announced] == hosts  # the LAN's is not among them
    entry = internet.start("r", "-c", NODE, "0.0.0.0:4000", announced[1])
    address = entry.wait("verdict", lambda event: event["event"] == "reach" and event["addresses"])[
        "addresses"
    ][0]
    peer = internet.start("two", "-c", NODE, "0.0.0.0:4100", address)
    before = peer.wait("verdict", lambda event: event["event"] == "reach")["addresses"]
    assert [one.split("/")[2:5] for one in before] == [[hosts[0], "tcp", "4100"]]
    internet.lose_uplink("two")
    peer.wait(
        "other address", lambda event: any(f"/{hosts[1]}/tcp/4100/" in one for one in event["addresses"])
    )
    wait_until_known(entry, before[0].rpartition("/")[2], hosts[1])


def test_peers_behind_routers_call_each_other_through_a_relay(internet: Internet) -> None:
    internet.public("r")
    for name in ("a", "b"):
        internet.behind_router(name, "symmetric")
    entry = command(internet, "r", "bootstrap")
    address = entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    relay = address.rpartition("/")[2]
    peers = {name: internet.start(name, "-c", PEER, "0.0.0.0:4000", address) for name in ("a", "b")}
    reached = {}
    for name, peer in peers.items():
        reached[name] = peer.wait("relay", lambda event: "through relay" in event.get("text", ""))
        assert f"through relay {relay[-8:]}" in reached[name]["text"]
        _, circuit = reached[name]["contact"]
        assert circuit.endswith(f"/p2p/{relay}/p2p-circuit")
    for caller, callee in (("a", "b"), ("b", "a")):
        peers[caller].tell(json.dumps(reached[callee]["contact"]))
        answer = peers[caller].wait("answer", lambda event: event["event"] == "called")
        assert answer.get("agent", answer).startswith("swarm/")


def command(internet: Internet, host: str, *arguments: str) -> Process:
    """Run a command of `swarm` on a host."""
    identity = ("--identity", "new")
    return internet.start(host, "-m", "swarm.cli", *arguments, *identity, "--json", "--exit-with-parent")


def test_experts_of_a_server_that_opens_no_port_are_called_through_a_relay(internet: Internet) -> None:
    entry, address = entry_point(internet)
    internet.public("server")
    internet.public("caller")
    experts = ("--experts", "ffn.[0:2]", "--hidden-dim", "16", "--open", "--device", "cpu")
    server = command(internet, "server", "serve", address, *experts, "--listen", "none")
    listening = server.wait("start", lambda event: event["event"] == "listening")
    assert (listening["addresses"], listening["reach"]) == ([], "hidden")
    reached = server.wait("relay", lambda event: "through relay" in event.get("text", ""))["text"]
    assert reached.endswith("because it listens for calls from this machine only")
    name = server.wait("experts", lambda event: event["event"] == "serving")["experts"][0]
    caller = internet.start("caller", "-c", CALLER, name, address)
    assert caller.wait("answer", lambda event: event["event"] == "called")["shape"] == [4, 16]
    before = server.seen()
    entry.kill()  # the server has no other relay, and no port: nobody reaches it now
    server.wait("verdict", lambda event: "experts are not declared" in event.get("text", ""), since=before)


def epochs(process: Process, **fits: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in process.events
        if event["event"] == "epoch" and all(event[name] == value for name, value in fits.items())
    ]


def test_when_a_relay_is_killed_calls_go_through_the_other_one(internet: Internet) -> None:
    for name in ("r", "s"):
        internet.public(name)
    for name in ("a", "b"):
        internet.behind_router(name, "symmetric")
    first = command(internet, "r", "bootstrap")
    address = first.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    second = command(internet, "s", "bootstrap", "--bootstrap", address)
    other = second.wait("address", lambda event: event["event"] == "listening")["peer_id"]
    peers = {name: internet.start(name, "-c", PEER, "0.0.0.0:4000", address) for name in ("a", "b")}
    for peer in peers.values():
        peer.wait("two relays", lambda event: len(event.get("contact", ())) == 3)
    contact = peers["b"].wait("relays", lambda event: len(event.get("contact", ())) == 3)["contact"]
    peers["a"].tell(json.dumps(contact))
    peers["a"].wait("answer", lambda event: event["event"] == "called" and not event["why"])
    before = peers["b"].seen()
    first.kill()
    peers["b"].wait(
        "one relay",
        lambda event: len(event.get("contact", ())) == 2 and other in event["contact"][1],
        since=before,
    )
    for number in range(2, 4):  # a connection that was open fails once
        peers["a"].tell(json.dumps(contact))
        peers["a"].wait("outcome", lambda _, of=peers["a"], n=number: len(outcomes(of)) >= n)
    assert outcomes(peers["a"])[-1]["why"] == ""


def outcomes(process: Process) -> list[dict[str, Any]]:
    """Return how the calls of a hidden node have ended."""
    return [event for event in process.events if event["event"] == "called"]


def assert_same_digests(*processes: Process) -> None:
    """Check that volunteers had the same parameters at the end of each epoch."""
    digests: dict[int, set[str]] = {}
    for process in processes:
        for event in epochs(process):
            if event["digest"]:
                digests.setdefault(event["epoch"], set()).add(event["digest"])
    assert digests
    assert all(len(found) == 1 for found in digests.values())


def test_volunteers_behind_routers_train_with_a_public_one(internet: Internet, tmp_path: Path) -> None:
    run = write_small_run(tmp_path)
    one_public_and_two_behind_routers(internet)
    public = command(internet, "r", "start", str(run), "--device", "cpu")
    invite = public.wait("invite", lambda event: event["event"] == "listening")["invite"]
    hidden = [command(internet, name, "join", invite, "--yes", "--device", "cpu") for name in ("a", "b")]
    for process in hidden:
        process.wait("contribution", lambda event: event["event"] == "contributing")
        reach = process.wait("verdict", lambda event: "others cannot call" in event.get("text", ""))
        assert reach["event"] == "notice"
    for process in (public, *hidden):
        process.wait("rounds of three", lambda _, of=process: len(epochs(of, peers=3)) >= 3)
    assert_same_digests(public, *hidden)
    for process in hidden:
        assert any(event["samples"] > 0 for event in epochs(process, peers=3))


def test_the_doctor_says_what_the_router_would_have_to_forward(internet: Internet) -> None:
    one_public_and_two_behind_routers(internet)
    address = address_of(internet.start("r", "-c", NODE, "0.0.0.0:4000"))
    examined = internet.start("a", "-m", "swarm.cli", "doctor", address, "--listen", "0.0.0.0:4100", "--json")
    reach = examined.wait("finding", lambda event: event.get("subject") == "reach")
    assert (reach["state"], "others cannot call this machine" in reach["text"]) == ("note", True)
    assert reach["text"].endswith("The line for the router: TCP port 4100 to 192.168.1.2 port 4100")
    assert examined.wait("result", lambda event: event["event"] == "doctor")["can_volunteer"] is True


@pytest.mark.parametrize(
    ("port", "announced", "state", "said"),
    [
        (4000, ["{router}:4000"], "good", "it announces {router}:4000"),
        (4100, ["{router}:4100"], "bad", "{router}:4100, but {peer} called {router}:4100 in vain: "),
        (4000, ["192.168.1.2:4000"], "bad", "but peers of the internet do not dial 192.168.1.2:4000: "),
        # the only peer calls one of the two
        (4000, ["{router}:4000", "{router}:4100"], "note", "but no peer has tried {router}:4100"),
    ],
)
def test_the_doctor_lets_others_call_the_addresses_that_the_user_has_given(
    port: int, announced: list[str], state: str, said: str, internet: Internet
) -> None:
    one_public_and_two_behind_routers(internet)
    internet.forward("a", 4000)
    address = address_of(internet.start("r", "-c", NODE, "0.0.0.0:4000"))
    names = {"router": internet.routers["a"], "peer": address[-8:]}
    where = ["--listen", f"0.0.0.0:{port}"]
    for one in announced:
        where += ["--announce", one.format(**names)]
    examined = internet.start("a", "-m", "swarm.cli", "doctor", address, *where, "--json")
    reach = examined.wait("finding", lambda event: event.get("subject") == "reach")
    assert reach["state"] == state
    assert said.format(**names) in reach["text"]
    assert ("but" in reach["text"]) is ("but" in said)
    result = examined.wait("result", lambda event: event["event"] == "doctor")
    assert result["can_volunteer"] is (state != "bad")


@pytest.mark.parametrize("kind", ["preserving", "symmetric"])
def test_the_doctor_says_relays_with_their_latency_kind_of_nat_speed_and_what_to_forward(
    kind: RouterKind, internet: Internet
) -> None:
    internet.behind_router("a", kind)
    _, address = entry_point(internet, "s")
    entry_point(internet, "r", address)
    contact_of(
        peer_behind(internet, "b", "symmetric", address), ways=2
    )  # until the second one relays as well
    examined = internet.start("a", "-m", "swarm.cli", "doctor", address, "--json")
    found = {}
    for subject in ("reach", "relays", "NAT", "speed"):
        finding = examined.wait(subject, lambda event, of=subject: event.get("subject") == of)
        found[subject] = (finding["state"], finding["text"])
    state, said = found["reach"]
    assert (state, "others reach this machine through relay" in said) == ("note", True)
    line = "The line for the router: TCP port 4000 to 192.168.1.2 port 4000, and listen there with --listen "
    assert said.endswith(f"{line}0.0.0.0:4000")
    state, said = found["relays"]
    assert (state, address.rpartition("/")[2] in said, " ms, used here)" in said) == ("good", True, True)
    kinds = {"preserving": "port-preserving", "symmetric": "symmetric"}
    assert found["NAT"][1].startswith(kinds[kind])
    assert f"MB/s to {address.rpartition('/')[2]} and " in found["speed"][1]


def test_volunteers_behind_routers_train_with_one_another_through_a_relay(
    internet: Internet, tmp_path: Path
) -> None:
    run = write_small_run(tmp_path)
    internet.public("r")
    for name in ("a", "b", "c"):
        internet.behind_router(name, "symmetric")
    entry = command(internet, "r", "bootstrap")
    address = entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    founder = command(internet, "a", "start", str(run), "--bootstrap", address, "--device", "cpu")
    line = founder.wait("join line", lambda event: event["event"] == "listening")["invite"]
    guests = [command(internet, name, "join", line, "--yes", "--device", "cpu") for name in ("b", "c")]
    for process in (founder, *guests):
        process.wait("relay", lambda event: "reach this machine through relay" in event.get("text", ""))
        process.wait("rounds of three", lambda _, of=process: len(epochs(of, peers=3)) >= 3, 240.0)
    assert_same_digests(founder, *guests)
    for process in guests:
        assert any(event["samples"] > 0 for event in epochs(process, peers=3))


def test_volunteers_that_nobody_can_call_are_told_so(internet: Internet, tmp_path: Path) -> None:
    run = write_small_run(tmp_path)
    one_public_and_two_behind_routers(internet)
    entry = command(internet, "r", "bootstrap", "--relay-mbit", "0")
    address = entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]
    founder = command(internet, "a", "start", str(run), "--bootstrap", address, "--device", "cpu")
    invite = founder.wait("invite", lambda event: event["event"] == "listening")["invite"]
    founder.wait("verdict", lambda event: "others cannot call" in event.get("text", ""))
    founder.wait("epoch", lambda event: event["event"] == "epoch")
    guest = command(internet, "b", "join", invite, "--yes", "--device", "cpu")
    said = guest.wait("sentence", lambda event: event["event"] == "error")["text"]
    assert "none of them can be called" in said
    founder.wait("more epochs", lambda _: len(epochs(founder)) >= 3)
