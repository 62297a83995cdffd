"""The collector: times ahead of the clock, totals of large runs, and the peers that it tries when none
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from averaging.optim.progress.logic.reports import ProgressTotal
from swarm.core.errors import DeadlineExceeded
from swarm.core.ids import Address, Contact, Key
from swarm.dht.logic.records import Entry
from swarm.dht.service.dht_service import ManyAnswers
from swarm.metrics.record import metrics_key
from swarm.monitor.collector import Collector
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.reading import donors_key, progress_key, read
from swarm.testing.virtual_loop import VirtualClock, run_virtual
from tests.monitor.watched_run import RUN, metrics, peer, peer_records, poll, report

ADDRESS = "/ip4/198.51.100.7/tcp/4000/tls/http"
NOW_S = 1_000_000.0


def entry(number: int, value: Any, issued_s: float = NOW_S) -> Entry:
    return Entry(
        value=value,
        subkey=str(peer(number)),
        writer=peer(number),
        issued_at=issued_s,
        expiration=issued_s + 8.0,
    )


def answers(*found: tuple[Key, Entry]) -> dict[Key, dict[str, Entry]]:
    kept: dict[Key, dict[str, Entry]] = {}
    for key, one in found:
        kept.setdefault(key, {})[str(one.writer)] = one
    return kept


def metrics_entry(number: int, at_s: float, issued_s: float = NOW_S) -> tuple[Key, Entry]:
    return metrics_key(RUN.run_id, peer(number)), entry(number, metrics(at_s).encode(), issued_s)


def test_times_of_records_are_limited_to_their_issue() -> None:
    found = read(
        RUN.run_id, answers(metrics_entry(1, NOW_S + 1e6, NOW_S - 20.0), metrics_entry(2, NOW_S - 3.0)), NOW_S
    )
    assert found.peers[peer(1)].at_s == NOW_S - 20.0
    assert found.peers[peer(2)].at_s == NOW_S - 3.0


def test_malformed_records_are_counted_and_skipped() -> None:
    bad = metrics_key(RUN.run_id, peer(3)), entry(3, {"at": "now"})
    worse = progress_key(RUN.run_id), entry(4, {**report(NOW_S).encode(), "total": [1, 2]})
    found = read(RUN.run_id, answers(metrics_entry(1, NOW_S), bad, worse), NOW_S)
    assert (set(found.peers), found.refused) == ({peer(1)}, 2)


def test_only_donors_with_a_digest_declare_a_state() -> None:
    def donor(number: int, **fields: Any) -> tuple[Key, Entry]:
        return donors_key(RUN.run_id), entry(
            number, {"epoch": 7, "addresses": [ADDRESS], "canonical": True, **fields}
        )

    found = read(
        RUN.run_id,
        answers(
            donor(1, digest=b"ab"), donor(2, digest=b""), donor(3), donor(4, digest=b"cd", canonical=False)
        ),
        NOW_S,
    )
    assert found.states == {peer(1): (7, "6162")}
    assert len(found.donors) == 4


def test_a_run_in_shards_shows_the_total_that_its_aggregators_agree_on() -> None:
    def aggregator(number: int, samples: float) -> tuple[Key, Entry]:
        total = ProgressTotal(
            epoch=7,
            samples=samples,
            rate=0.0,
            peers=100,
            median_rate=1.0,
            at_s=NOW_S,
            since_s=NOW_S - 5.0,
            bits=2,
        )
        return progress_key(RUN.run_id), entry(
            number, {**report(NOW_S, samples=0).encode(), "total": total.encode()}
        )

    entries = [metrics_entry(number, NOW_S) for number in range(1, 20)]
    found = read(
        RUN.run_id, answers(*entries, aggregator(1, 600.0), aggregator(2, 610.0), aggregator(3, 1e12)), NOW_S
    )
    assert found.total is not None
    model = Model(RUN)
    model.on_poll(poll(found.peers, total=found.total), NOW_S)
    assert model.view(NOW_S).samples == 610.0
    assert read(RUN.run_id, answers(*entries, aggregator(1, 600.0)), NOW_S).total is None, (
        "one alone is not believed"
    )


class Deaf:
    """A DHT in which no peer answers."""

    def __init__(self) -> None:
        self.knocked: list[Contact] = []
        self.found: dict[Key, dict[str, Entry]] = {}

    async def get_many(self, keys: Sequence[Key], **options: Any) -> ManyAnswers:
        if self.found:
            return ManyAnswers({key: entries for key, entries in self.found.items()}, {})  # noqa: C416
        return ManyAnswers({}, {key: DeadlineExceeded("nobody") for key in keys})

    async def ping(self, contact: Contact) -> bool:
        return False

    async def join(self, contacts: Sequence[Contact]) -> None:
        self.knocked += contacts


def test_the_collector_tries_peers_that_only_the_run_named() -> None:
    async def scenario() -> None:
        clock, dht = VirtualClock(), Deaf()
        now_s = clock.swarm_s()
        way_in = Contact(peer(50), (Address.parse(ADDRESS),))
        collector = Collector(
            dht=dht, clock=clock, model=Model(RUN), entry=(way_in,), known=list, remembered=list
        )
        trainer = (
            progress_key(RUN.run_id),
            entry(1, {**report(now_s).encode(), "addresses": [ADDRESS]}, now_s),
        )
        dht.found = answers(trainer)
        await collector.poll()
        assert collector.model.view(clock.swarm_s()).live
        dht.found = {}
        await collector.poll()
        assert collector.model.view(clock.swarm_s()).link.status == "lost"
        assert {contact.peer_id for contact in dht.knocked} == {peer(50), peer(1)}

    run_virtual(scenario())


def test_an_empty_run_is_live_while_any_peer_answers() -> None:
    async def scenario() -> None:
        clock, dht = VirtualClock(), Deaf()
        way_in = Contact(peer(50), (Address.parse(ADDRESS),))
        collector = Collector(
            dht=dht, clock=clock, model=Model(RUN), entry=(way_in,), known=list, remembered=list
        )

        async def there(contact: Contact) -> bool:
            return True

        dht.ping = there  # type: ignore[method-assign]
        await collector.poll()
        view = collector.model.view(clock.swarm_s())
        assert (view.live, view.peers) == (True, ())
        assert not dht.knocked

    run_virtual(scenario())


def test_the_poll_interval_follows_the_publishing_interval_of_a_large_run() -> None:
    async def scenario() -> None:
        clock, dht = VirtualClock(), Deaf()
        collector = Collector(dht=dht, clock=clock, model=Model(RUN), entry=(), known=list, remembered=list)

        def publish(count: int, every_s: float) -> None:
            fresh = [
                (
                    metrics_key(RUN.run_id, peer(n)),
                    entry(n, metrics(clock.swarm_s(), every_s=every_s).encode()),
                )
                for n in range(1, count)
            ]
            dht.found = answers(*fresh)

        publish(5, 2.0)
        assert await collector.poll() == 1.0
        publish(100, 15.0)
        assert await collector.poll() == 12.0
        publish(100, 600.0)
        assert await collector.poll() == 12.0, "claims cannot stop a monitor from polling"

    run_virtual(scenario())


def test_the_time_of_records_is_that_of_the_later_one() -> None:
    assert peer_records(5.0).at_s == 5.0
