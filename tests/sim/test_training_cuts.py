"""A training that loses its quorum, at every moment of an epoch: how soon those that are left continue."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from averaging.allreduce.logic.votes import VoteExchange
from averaging.history.certificate import RoundKind, Vote
from averaging.history.grace import GRACE_S_MIN
from averaging.optim.epoch_averager import OBSOLETE_ROUND_GRACE_S
from averaging.optim.state.donor import Donor
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual, until
from swarm.wire.state_pb2 import OpenReply, OpenRequest

STEP_S, SAMPLES = 0.5, 4
# after the grace: until reports of the others have expired, and a round is given up
GOES_ON_S = GRACE_S_MIN + 12.0


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("mode", "epoch_s", "moment"),
    [("gradients", 2.0, moment) for moment in (0, 1, 4, 14, 22)] + [("local", 5.0, 0), ("diloco", 5.0, 9)],
)
def test_peers_that_lost_the_quorum_continue_after_the_grace(
    mode: str, epoch_s: float, moment: int, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The two of four peers that decide a tie are killed or cut off. One of the others may be in a search for
    a group when the other one has noticed. With local steps they train on meanwhile. `moment`: in 24ths of
    an epoch, and the seed.
    """
    caplog.set_level(logging.CRITICAL)
    goes_on_s = run_virtual(_seconds_until_two_of_four_continue(mode, epoch_s, moment, cut=cut))
    assert goes_on_s is not None
    assert goes_on_s <= GOES_ON_S + 3 * 2 * epoch_s, (
        "two complete epochs of two peers, which take twice as long"
    )


def test_a_peer_that_trains_on_without_a_quorum_says_once_that_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression test: it said so at every step."""
    caplog.set_level(logging.WARNING, "averaging.optim.closing")
    run_virtual(_seconds_until_two_of_four_continue("local", 5.0, 0, cut=True))
    said = [text for text in caplog.messages if "is full, and not closed" in text]
    epochs = Counter(text.partition(" is full")[0] for text in said)
    assert epochs
    assert max(epochs.values()) <= 4, "each of four peers once"


@pytest.mark.parametrize(("mode", "seed"), [("gradients", 0), ("local", 1), ("diloco", 2)])
def test_votes_that_bind_in_a_round_over_the_state_cost_one_grace(
    mode: str, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three peers vote for the averages of their state, and are cut off before one hears of another one's
    vote, until all have given the round up. Nobody can commit that round nor another one then, though all are
    there.
    """
    caplog.set_level(logging.CRITICAL)
    add_own, on_statement, votes = VoteExchange.add_own, VoteExchange.on_statement, 0
    network: SimulatedNetwork

    def add_own_and_cut(exchange: VoteExchange, vote: Vote, now_s: float) -> None:
        nonlocal votes
        if vote.result and exchange.tally.proposal.kind is RoundKind.STATE and votes < 3:
            votes += 1
            if votes == 3:
                network.partition(*([peer] for peer in network.peers.values()))
        add_own(exchange, vote, now_s)

    def deaf_until_all_have_voted(exchange: VoteExchange, *args: Any) -> bool:
        return votes in (0, 3) and on_statement(exchange, *args)

    async def main() -> float:
        nonlocal network
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.0))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=48, mode=mode)
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(3)]
            while votes < 3 and loop.time() < 100.0:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            cut_s, epoch = loop.time(), _epoch(peers[0])
            await asyncio.sleep(6.0)
            network.partition()
            assert votes == 3
            while loop.time() < cut_s + 100.0 and any(  # noqa: ASYNC110 - virtual time
                _epoch(one) == epoch for one in peers
            ):
                await asyncio.sleep(0.25)
            await swarm.close()
            goes_on_s = loop.time() - cut_s
        assert not checks.violations.count, checks.violations.lines
        return goes_on_s

    monkeypatch.setattr(VoteExchange, "add_own", add_own_and_cut)
    monkeypatch.setattr(VoteExchange, "on_statement", deaf_until_all_have_voted)
    # the cut, until the round is given up for the lack of a quorum, an epoch, the grace and a round
    assert run_virtual(main()) <= 6.0 + OBSOLETE_ROUND_GRACE_S + 4.0 + GOES_ON_S


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("mode", ["gradients", "local"])
@pytest.mark.parametrize("seed", range(2))
def test_a_peer_that_continues_with_a_break_does_not_wait_for_one_that_loads_a_state(
    seed: int, mode: str, count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: of `count` peers the half that decides is cut off, and a newcomer's download hangs.
    The newcomer seeks no round with a break, so the search for a group took all of its time. Of four peers,
    one more is cut off before the grace ends: the last one knows so only after its search has begun.
    """
    caplog.set_level(logging.CRITICAL)
    on_open, downloads = Donor.on_open, asyncio.Event()

    async def never_opens(donor: Donor, peer: PeerId, request: OpenRequest) -> OpenReply:
        if not request.reserve:
            downloads.set()
            await asyncio.Event().wait()
        return await on_open(donor, peer, request)

    monkeypatch.setattr(Donor, "on_open", never_opens)

    async def main() -> float:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=2 * count * SAMPLES, mode=mode)  # an epoch takes 1 s
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(count)]
            await until(lambda: all(one.optimizer is not None and _epoch(one) >= 3 for one in peers), 60.0)
            for one in peers:
                checks.ledger.read(one, loop.time())
            electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
            peers.sort(key=lambda one: electors.index(one.peer.peer_id))
            await swarm.add(batch=SAMPLES, compute_s=STEP_S)
            async with asyncio.timeout(60.0):
                await downloads.wait()
            await asyncio.sleep(2.0)
            began_s, left = loop.time(), peers[-1]
            network.partition([one.peer for one in peers[: count // 2]])
            await asyncio.sleep(GRACE_S_MIN - 2.0)
            network.partition([one.peer for one in peers[:-1]])
            epoch = _epoch(left)
            await until(lambda: _epoch(left) > epoch + 1, 100.0)
            goes_on_s = loop.time() - began_s
            await swarm.close()
        assert not checks.violations.count, checks.violations.lines
        return goes_on_s

    # a search that began with others is given up; then two epochs of one peer
    assert run_virtual(main()) <= GOES_ON_S + OBSOLETE_ROUND_GRACE_S + 2 * count * 1.0


@pytest.mark.parametrize("seed", range(2))
def test_a_peer_gives_up_a_state_that_no_live_peer_has(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a peer that had been cut off learned what the others had committed, and these died
    before they gave it the state. Their records as donors stand for a minute more.
    """
    caplog.set_level(logging.CRITICAL)
    asked = False

    async def is_busy(donor: Donor, peer: PeerId, request: OpenRequest) -> OpenReply:
        nonlocal asked
        asked = True
        raise PeerError("busy: it never has a place")

    async def main() -> float:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        checks, loop = TrainingChecks(Violations(), step_s_max=600.0), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=24), checks.on_step, group)
            peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S) for _ in range(3)]
            await until(lambda: all(one.optimizer is not None and _epoch(one) >= 3 for one in peers), 60.0)
            left, *others = peers[::-1]
            network.partition([left.peer])
            epoch = _epoch(left)
            assert await until(lambda: min(map(_epoch, others)) > epoch + 1, 60.0)
            with monkeypatch.context() as patched:
                patched.setattr(Donor, "on_open", is_busy)
                network.heal()
                assert await until(lambda: asked, 30.0)
            for one in others:
                await swarm.kill(one)
            began_s, epoch = loop.time(), _epoch(left)
            await until(lambda: _epoch(left) > epoch, 200.0)
            goes_on_s = loop.time() - began_s
            await swarm.close()
        assert not checks.violations.count, checks.violations.lines
        return goes_on_s

    # for as long as a peer without an answer waits, and for the grace
    assert run_virtual(main()) <= 15.0 + GOES_ON_S


async def _seconds_until_two_of_four_continue(
    mode: str, epoch_s: float, moment: int, *, cut: bool
) -> float | None:
    violations = Violations()
    checks = TrainingChecks(violations, step_s_max=600.0)
    network = SimulatedNetwork(moment, LinkConfig(delay_s=0.03, jitter=0.5))
    loop, found = asyncio.get_running_loop(), None
    async with asyncio.TaskGroup() as group:
        config = TrainingConfig(target_batch_size=int(4 * SAMPLES * epoch_s / STEP_S), mode=mode)
        swarm = TrainingSwarm(network, config, checks.on_step, group)
        peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S * (1 + 0.1 * n)) for n in range(4)]
        await asyncio.sleep(4.0 + epoch_s * (3 + moment / 24))
        for peer in peers:
            checks.ledger.read(peer, loop.time())
        electors = checks.ledger.electors(checks.newest(peers) or b"") or ()
        left = [one for one in peers if one.peer.peer_id not in electors[:2]]
        if cut:
            network.partition([one.peer for one in left])
        else:
            for one in [one for one in peers if one not in left]:
                await swarm.kill(one)
        began_s, epoch = loop.time(), max(_epoch(one) for one in left)
        while loop.time() < began_s + 100.0 and found is None:
            await asyncio.sleep(0.25)
            if all(_epoch(one) > epoch + 1 for one in left):
                found = loop.time() - began_s
        await swarm.close()
    assert not violations.count, violations.lines
    return found


def _epoch(one: TrainingPeer) -> int:
    assert one.optimizer is not None
    return one.optimizer.epoch


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_restarts_from_its_file_while_it_is_cut_off_gives_way_to_the_quorum(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a file named the head of its state, and not where that history had parted from the
    others', so that nothing tied the two together and the fork lasted.
    """
    caplog.set_level(logging.CRITICAL)
    came = run_virtual(_restart_from_a_file_in_a_cut(seed, tmp_path / "saved.safetensors"))
    assert came == ["trained", "broke", "resumed", "united"]


async def _restart_from_a_file_in_a_cut(seed: int, path: Path) -> list[str]:
    """Return the steps of the scene that came about in time."""
    violations, came = Violations(), []
    checks = TrainingChecks(violations, step_s_max=600.0)
    network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
    async with asyncio.TaskGroup() as group:
        config = TrainingConfig(target_batch_size=3 * 4 * SAMPLES)
        swarm = TrainingSwarm(network, config, checks.on_step, group)
        peers = [await swarm.add(batch=SAMPLES, compute_s=STEP_S * (1 + 0.1 * n)) for n in range(3)]
        if await until(lambda: all(one.optimizer is not None and _epoch(one) >= 3 for one in peers), 60.0):
            came.append("trained")
        lone = peers[-1]
        network.partition([lone.peer])
        if await until(lambda: _line(lone) != "", 90.0):
            came.append("broke")
        state = lone.save_state(path)
        await swarm.kill(lone)
        lone = await swarm.add(batch=SAMPLES, compute_s=STEP_S, peer=lone.peer, checkpoint=state)
        if await until(lambda: lone.optimizer is not None and _line(lone) != "", 10.0):
            came.append("resumed")
        network.heal()
        peers[-1] = lone
        if await until(lambda: all(_line(one) == "" for one in peers), 60.0):
            came.append("united")
        await swarm.close()
    assert not violations.count, violations.lines
    return came


def _line(one: TrainingPeer) -> str:
    assert one.optimizer is not None
    return one.optimizer.line
