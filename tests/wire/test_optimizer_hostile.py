"""Optimizers on real sockets among peers that lie about epochs and serve forged states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from averaging.optim.exchange import REPORT
from averaging.optim.progress.logic.reports import EPOCH_MAX, ProgressReport
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, Key
from swarm.node import Node
from swarm.wire import state_pb2
from tests.wire.lone_donor import lone_donor
from tests.wire.trainers import LOCAL, Peer, adam, build, one_more, together

LIARS = 10
FORGED, FORGED_RATE = 777.0, 123.0


class Liar:
    """A peer that declares a later epoch, or another state, and serves it."""

    def __init__(self, node: Node, victim: Peer, number: int) -> None:
        self.node, self.run = node, victim.opt.run_id
        net = build()
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(FORGED + number)
        inner = adam(net)
        inner.param_groups[0]["lr"] = FORGED_RATE
        self.state = TrainingState(inner)
        self.state.epoch, self.state.canonical = victim.opt.epoch + number % 3, True
        self.donor = lone_donor(node, self.run, self.state)

    def begin(self) -> None:
        self.donor.start()
        self.node.network.run(self._declare(), 10.0)

    async def _declare(self) -> None:
        self.node.supervisor.spawn("lying", self.donor.run)
        now_s = self.node.clock.swarm_s()
        report = ProgressReport(
            epoch=self.state.epoch, samples=9, rate=1.0, at_s=now_s, since_s=now_s, head=bytes([7]) * 32
        )
        value = {**report.encode(), "addresses": self.node.contact.published}
        await self.node.dht.service.store(Key(f"run.{self.run}", "progress"), value, ttl_s=60.0)

    def report_to(self, contact: Contact) -> None:
        """Report the highest epoch that there is."""
        now_s = self.node.clock.swarm_s()
        claim = state_pb2.Claim(epoch=EPOCH_MAX, samples=9, at_s=now_s, since_s=now_s, head=bytes([8]) * 32)
        request = state_pb2.ReportRequest(run=self.run, claim=claim, full=True)
        try:
            self.node.network.run(self.node.channels.call(contact, REPORT, request, timeout_s=3.0), 5.0)
        except SwarmError:
            return  # it may refuse it


@contextmanager
def liars_about(victim: Peer) -> Iterator[list[Liar]]:
    with ExitStack() as stack:
        made = []
        for number in range(LIARS):
            node = stack.enter_context(Node(victim.node.addresses, "127.0.0.1:0", config=LOCAL))
            made.append(Liar(node, victim, number))
        for one in made:
            one.begin()
        yield made


def largest(peer: Peer) -> float:
    return max(float(p.detach().abs().max()) for p in peer.net.parameters())


def test_a_newcomer_takes_the_state_of_one_honest_donor_among_ten_liars_and_trains_on_with_it() -> None:
    with one_more([], "hostile", 0) as honest:
        honest.train_to(2)
        with liars_about(honest) as liars, one_more([honest], "hostile", 1, seed=5) as newcomer:
            loaded = newcomer.opt.load_state_from_peers(timeout_s=60.0)
            assert loaded.loaded, loaded
            assert set(loaded.donors) == {honest.node.peer_id}
            assert loaded.epoch == honest.opt.epoch == 2
            assert "offers a state of epoch" in " ".join(loaded.failures.values()) or not loaded.failures
            for mine, theirs in zip(newcomer.net.parameters(), honest.net.parameters(), strict=True):
                assert torch.equal(mine, theirs)
            for liar in liars:
                for peer in (honest, newcomer):
                    liar.report_to(peer.node.contact)
            together([lambda: honest.train_to(4), lambda: newcomer.train_to(4)])
            assert {honest.opt.epoch, newcomer.opt.epoch} <= {4, 5}
            for peer in (honest, newcomer):
                assert largest(peer) < 10.0
                assert peer.opt.param_groups[0]["lr"] <= 0.01
