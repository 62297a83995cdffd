"""A monitor and the run that it watches on a simulated network: its entry peer dies, all peers die, peers
lie, and the view reports it.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest

from moe.protocol.declarations import Declarations, Directory, ServerLoad
from moe.protocol.names import ExpertUid
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.dht.service.dht_service import DhtService
from swarm.metrics.record import Metrics, metrics_key
from swarm.metrics.reporter import Reporter, period_s
from swarm.monitor.collector import Collector
from swarm.monitor.experts import experts_of
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.reading import progress_key
from swarm.monitor.logic.view import MonitorView, RunView
from swarm.testing.chance import Chance
from swarm.testing.network import SimulatedNetwork
from tests.sim.dht_scenarios import peer_of, play, service_of, swarm_of

RUN = RunView(run_id="a" * 20, name="tiny", version=1, target=1000)


@dataclass
class Trainer:
    """A peer that publishes metrics and progress, as an optimizer would."""

    service: DhtService
    rate: float = 100.0
    published: int = 0
    own: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> Metrics:
        self.published += 1
        now_s = self.service.clock.swarm_s()
        return Metrics(
            at_s=now_s,
            since_s=now_s - 60.0,
            every_s=2.0,
            epoch=5,
            samples_per_s=self.rate,
            loss=2.0,
            own=self.own,
        )

    def reporter(self, peers: int = 5, **config: Any) -> Reporter:
        return Reporter(
            dht=self.service,
            clock=self.service.clock,
            own=self.service.peer_id,
            run_id=RUN.run_id,
            source=self.metrics,
            peers=lambda: peers,
            **config,
            rng=Chance(1, "reporter", str(self.service.peer_id)),
        )

    async def progress(self) -> None:
        while True:
            now_s = self.service.clock.swarm_s()
            value = {
                "epoch": 5,
                "samples": 50,
                "rate": self.rate,
                "at": now_s,
                "since": now_s - 1.0,
                "addresses": self.addresses,
            }
            await self.service.store(progress_key(RUN.run_id), value, ttl_s=15.0)
            await asyncio.sleep(3.0)

    @property
    def addresses(self) -> list[str]:
        return [address.multiaddr for address in self.service.own().addresses]


class Stage:
    """A bootstrap peer, trainers, and a monitor that joined by the bootstrap peer."""

    def __init__(
        self, network: SimulatedNetwork, services: list[DhtService], group: asyncio.TaskGroup
    ) -> None:
        self.network, self.bootstrap, self.group = network, services[0], group
        self.trainers = [Trainer(service) for service in services[1:]]
        self.reporters = [trainer.reporter() for trainer in self.trainers]
        self.tasks = [group.create_task(reporter.run()) for reporter in self.reporters]
        self.tasks += [group.create_task(trainer.progress()) for trainer in self.trainers]

    async def watch(self) -> Collector:
        peer = self.network.peer(dialable=False)
        service = service_of(peer)
        await service.join([self.bootstrap.own()])
        collector = Collector(
            dht=service,
            clock=peer.clock,
            model=Model(RUN),
            entry=(self.bootstrap.own(),),
            known=lambda: list(service.overlay.table),
            remembered=lambda: [known.contact for known in peer.book.known()],
        )
        self.collector = collector
        self.tasks.append(self.group.create_task(collector.run()))
        await asyncio.sleep(6.0)
        return collector

    @property
    def view(self) -> MonitorView:
        return self.collector.model.view(self.collector.clock.swarm_s())

    def kinds(self) -> list[str]:
        return [event.kind for event in self.collector.model.events.latest]

    async def crash(self, service: DhtService) -> None:
        await self.network.crash(peer_of(self.network, service))

    def over(self) -> None:
        for task in self.tasks:
            task.cancel()


def on_stage(act: Any, trainers: int = 5, seed: int = 1) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, trainers + 1)
        async with asyncio.TaskGroup() as group:
            stage = Stage(network, services, group)
            await asyncio.sleep(3.0)
            await stage.watch()
            await act(stage)
            stage.over()

    play(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_all_publishing_peers_are_seen_and_dialed(seed: int) -> None:
    async def act(stage: Stage) -> None:
        await asyncio.sleep(10.0)
        view = stage.view
        assert view.live
        assert {peer.peer_id for peer in view.peers} == {
            str(trainer.service.peer_id) for trainer in stage.trainers
        }
        assert (view.samples_per_s, view.loss, view.epoch) == (500.0, 2.0, 5)
        assert all(peer.fresh and peer.age_s < 6.0 and peer.reached for peer in view.peers)
        assert view.samples >= 250

    on_stage(act, seed=seed)


def test_a_newcomer_to_a_large_run_publishes_no_metrics_while_it_joins() -> None:
    async def act(stage: Stage) -> None:
        late = Trainer(service_of(stage.network.peer()))
        await late.service.join([stage.bootstrap.own()])
        reporter = late.reporter(peers=40)
        stage.tasks.append(stage.group.create_task(reporter.run()))
        every_s = period_s(reporter.every_s, 40)
        assert every_s > 9.0
        await asyncio.sleep(every_s - 1.0)
        assert late.published == 0
        await asyncio.sleep(2.0)
        assert late.published == 1

    on_stage(act)


def test_the_monitor_continues_and_reports_when_its_entry_peer_dies() -> None:
    async def act(stage: Stage) -> None:
        await stage.crash(stage.bootstrap)
        await asyncio.sleep(30.0)
        view = stage.view
        assert view.live
        assert view.peers_live == 5
        assert view.link.entry_answers is False
        assert "watching through" in view.link.text
        assert stage.kinds().count("entry_lost") == 1
        late = Trainer(service_of(stage.network.peer()))
        await late.service.join([stage.trainers[0].service.own()])
        stage.tasks.append(stage.group.create_task(late.reporter().run()))
        await asyncio.sleep(10.0)
        assert stage.view.peers_live == 6

    on_stage(act)


def test_no_value_is_fresh_while_no_peer_answers_and_one_returning_peer_suffices() -> None:
    async def act(stage: Stage) -> None:
        peers = [peer_of(stage.network, trainer.service) for trainer in stage.trainers]
        everybody = [peer_of(stage.network, stage.bootstrap), *peers]
        stage.network.partition(
            [peer for peer in stage.network.peers.values() if peer not in everybody], everybody
        )
        await asyncio.sleep(50.0)
        view = stage.view
        assert view.link.status == "lost"
        assert view.link.age_s is not None
        assert view.link.age_s > 40.0
        assert not view.live
        assert (view.samples_per_s, view.peers_live, view.loss) == (0.0, 0, None)
        assert "link_lost" in stage.kinds()
        stage.network.heal()
        await asyncio.sleep(50.0)
        assert stage.view.live
        assert stage.view.peers_live == 5
        assert stage.kinds()[-1] != "link_lost"
        assert "link_back" in stage.kinds()

    on_stage(act)


def test_the_monitor_finds_the_only_volunteer_that_survives() -> None:
    async def act(stage: Stage) -> None:
        await asyncio.sleep(5.0)
        for service in [stage.bootstrap, *(trainer.service for trainer in stage.trainers[1:])]:
            await stage.crash(service)
        await asyncio.sleep(50.0)
        view = stage.view
        assert view.live
        assert [peer.peer_id for peer in view.peers if peer.fresh] == [str(stage.trainers[0].service.peer_id)]
        assert stage.kinds().count("lost") == 4

    on_stage(act)


def test_a_peer_that_leaves_is_shown_as_left() -> None:
    async def act(stage: Stage) -> None:
        leaver: PeerId = stage.trainers[2].service.peer_id
        for place in (2, 7):
            stage.tasks[place].cancel()
        await stage.reporters[2].close()
        await stage.trainers[2].service.delete(progress_key(RUN.run_id))
        await asyncio.sleep(6.0)
        assert {peer.peer_id: peer.state for peer in stage.view.peers}[str(leaver)] == "left"
        assert "lost" not in stage.kinds()

    on_stage(act)


def test_records_that_break_the_schema_are_stored_by_no_replica() -> None:
    async def act(stage: Stage) -> None:
        liar = stage.trainers[0].service
        for value in (
            {"at": 1.0},
            {"at": float("inf")},
            "text",
            {**stage.trainers[0].metrics().encode(), "name": "x" * 500},
        ):
            with pytest.raises(UsageError):
                await liar.store(metrics_key(RUN.run_id, liar.peer_id), value, ttl_s=20.0)
        other = metrics_key(RUN.run_id, stage.trainers[1].service.peer_id)
        with pytest.raises(UsageError):
            await liar.store(
                other,
                stage.trainers[0].metrics().encode(),
                ttl_s=20.0,
                subkey=str(stage.trainers[1].service.peer_id),
            )
        await asyncio.sleep(3.0)
        assert stage.view.peers_live == 5

    on_stage(act)


def test_peers_of_large_runs_publish_less_often() -> None:
    assert period_s(2.0, 1) == period_s(2.0, 8) == 2.0
    assert 2.0 < period_s(2.0, 30) < period_s(2.0, 1000) == 15.0


def test_a_peer_with_metrics_disabled_publishes_nothing() -> None:
    async def act(stage: Stage) -> None:
        quiet = Trainer(service_of(stage.network.peer()))
        await quiet.service.join([stage.bootstrap.own()])
        await quiet.reporter(publish=False).run()
        assert quiet.published == 0

    on_stage(act, trainers=2)


@pytest.mark.parametrize("grids", [("ffn",), ()], ids=["named", "found"])
def test_experts_below_a_grid_are_shown_with_their_servers_and_load(grids: tuple[str, ...]) -> None:
    async def act(stage: Stage) -> None:
        for trainer, names, wait_s in zip(
            stage.trainers,
            (("ffn.0.1", "ffn.3"), ("ffn.0.1",), ("ffn.0.1", "other.1")),
            (1.0, 3.0, 2.0),
            strict=False,
        ):
            experts = {ExpertUid.parse(name): bytes(16) for name in names}
            load = ServerLoad(wait_s, 100.0)
            await Declarations(
                trainer.service, trainer.service.own, experts, lambda load=load: load
            ).declare()  # type: ignore[misc]
        directory = Directory(peer_of_collector(stage))
        stage.collector.experts = functools.partial(experts_of, directory, grids)
        await asyncio.sleep(10.0)
        ffn = [("ffn.3", 1, 1.0), ("ffn.0.1", 3, 2.0)]
        expected = ffn if grids else [*ffn, ("other.1", 1, 2.0)]
        assert sorted((one.uid, one.servers, one.load) for one in stage.view.experts) == sorted(expected)

    on_stage(act, trainers=3)


def peer_of_collector(stage: Stage) -> DhtService:
    assert isinstance(stage.collector.dht, DhtService)
    return stage.collector.dht
