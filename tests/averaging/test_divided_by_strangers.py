"""Identities cost nothing: they do not make a small run look so large that its members are divided into parts
in which they do not look for one another.

Before, 65 reports of strangers divided the progress of a run, two notices sent its members elsewhere, eight
presence records with a notice scattered the holders of an averager over 2^20 dictionaries, and as many
presence records as a group has seats made a grid.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from averaging.history.lineage import Lineage
from averaging.matchmaking.logic.grid import AveragingGrid, Shape
from averaging.matchmaking.logic.messages import AveragerName, VectorSchema
from averaging.matchmaking.logic.presence_shards import FLAT_MAX as HOLDERS_MAX
from averaging.matchmaking.service.presence import DhtPresence
from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import FLAT_MAX
from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.tree import Tree
from averaging.run_ledger import RunLedger
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import Founding, PeerStanding
from swarm.dht.logic.records import Entry
from tests.averaging.optim.progress_dht import Dht

RUN, NOW_S = "run", 1000.0
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(1000)]
OWN, MEMBERS, STRANGERS = PEERS[0], PEERS[:2], PEERS[100:]
REPORT = ProgressReport(epoch=3, samples=1, rate=1.0, at_s=NOW_S, since_s=NOW_S - 1)
TOTAL = ProgressTotal(
    epoch=3, samples=1.0, rate=1.0, peers=900, median_rate=1.0, at_s=NOW_S, since_s=NOW_S - 1, bits=4
)


def standing(members: int, *, is_large: bool = False) -> ReportStanding:
    known = frozenset(PEERS[:members])
    return ReportStanding(OWN, PEERS[:members], known.__contains__, is_large)


def entry(writer: PeerId, value: dict[str, Any]) -> Entry:
    return Entry(value=value, subkey=str(writer), writer=writer, issued_at=NOW_S, expiration=NOW_S + 15.0)


def bits_after(reports: list[PeerId], notices: list[PeerId], known: ReportStanding) -> int:
    """Return into how fine a division a peer goes by what it reads."""
    dht: Any = Dht()
    tree = Tree(dht, RUN, OWN, NOW_S)
    entries = [entry(peer, {**REPORT.encode(), "total": TOTAL.encode()}) for peer in notices]
    asyncio.run(tree.after_refresh(entries, dict.fromkeys([OWN, *reports], REPORT), known, NOW_S))
    return tree.bits


@pytest.mark.parametrize("strangers", [FLAT_MAX, 255])
@pytest.mark.parametrize("members", [1, 2, FLAT_MAX // 2 - 1])
def test_reports_of_strangers_divide_no_run_of_few_members(members: int, strangers: int) -> None:
    reports = [*PEERS[1:members], *STRANGERS[:strangers]]
    assert bits_after(reports, [], standing(members)) == 0
    assert bits_after(reports, [], standing(0)) > 0, "before there are electors everybody counts"


def test_a_run_of_many_members_is_divided() -> None:
    assert bits_after(PEERS[1 : FLAT_MAX + 1], [], standing(FLAT_MAX + 1)) > 0
    assert bits_after([*PEERS[1:40], *STRANGERS[:40]], [], standing(40)) > 0


def test_notices_of_strangers_send_no_member_of_a_small_run_elsewhere() -> None:
    assert bits_after([], STRANGERS[:3], standing(2)) == 0
    assert bits_after([], [*MEMBERS, PEERS[2]], standing(3)) == TOTAL.bits
    assert bits_after([], STRANGERS[:3], standing(2, is_large=True)) == TOTAL.bits
    assert bits_after([], STRANGERS[:3], standing(0)) == TOTAL.bits, "a newcomer knows nobody"


class Clock:
    def monotonic_s(self) -> float:
        return NOW_S

    def swarm_s(self) -> float:
        return NOW_S


def ledger(members: int, founding: Founding | None = None) -> RunLedger:
    known = PeerStanding()
    known.add_members(RUN, PEERS[:members])
    if founding is not None:
        known.set_founding(RUN, founding)
    return RunLedger(OWN, RUN, Clock(), known)


@pytest.mark.parametrize("members", [1, 2, 31])
def test_strangers_count_as_many_as_members_at_most(members: int) -> None:
    one = ledger(members)
    assert not one.may_divide([*PEERS[:members], *STRANGERS], 64)
    assert one.may_divide([*PEERS[:members], *STRANGERS], 2 * members - 1)
    assert ledger(0).may_divide(STRANGERS, 64), "before there are members everybody counts"
    assert ledger(members, Founding(is_invited=True)).may_divide(STRANGERS, 64), "there are no strangers"


@pytest.mark.parametrize(("grid_rounds", "divides"), [(1, False), (2, True)])
def test_a_run_that_is_large_by_its_certificates_is_divided(
    monkeypatch: pytest.MonkeyPatch, grid_rounds: int, divides: bool
) -> None:
    monkeypatch.setattr(Lineage, "grid_rounds", grid_rounds)
    one, lineage = ledger(2), Lineage(RUN, OWN)
    one.follow(lineage)
    assert one.may_divide([*MEMBERS, *STRANGERS], 64) is divides


def presence(holders: dict[PeerId, int], may_divide: Any) -> DhtPresence:
    """Return the presence records of `holders`, each with the bits of its notice."""
    dht: Any = Dht()
    contact = Contact(OWN, (Address("127.0.0.1", 4000),))
    dht.found = {
        str(peer): entry(
            peer, {"addresses": [], "schema": b"s", "text": "", **({"bits": bits} if bits else {})}
        )
        for peer, bits in holders.items()
    }
    return DhtPresence(
        dht=cast(Any, dht),
        name=AveragerName(run=RUN, averager="a"),
        own=lambda: contact,
        schema=VectorSchema(digest=b"s", text="", codec="float32"),
        may_divide=may_divide,
    )


@pytest.mark.parametrize(
    ("count", "bits"), [(8, 20), (HOLDERS_MAX, 0)], ids=["eight notices", "one too many"]
)
def test_presence_records_of_strangers_do_not_scatter_the_members(count: int, bits: int) -> None:
    holders = {**dict.fromkeys(MEMBERS, 0), **dict.fromkeys(STRANGERS[:count], bits)}

    async def read(members: int) -> tuple[int, set[PeerId]]:
        one = presence(holders, ledger(members).may_divide)
        found = await one.read(5.0)
        return one.shard.bits, set(found)

    assert asyncio.run(read(2)) == (0, set(holders))
    assert asyncio.run(read(0))[0] > 0, "before there are members everybody counts"


def test_one_cell_holds_a_run_that_may_not_be_divided() -> None:
    grid = AveragingGrid(OWN, 4)
    grid.on_records(PEERS[1:200], may_divide=False)
    assert not grid.divided
    assert not grid.adopt_shape(Shape(4, 50)), "nor because a stranger says so"
    grid.on_records(PEERS[1:200])
    assert grid.divided
    grid.on_records(PEERS[1:200], may_divide=False)
    assert not grid.divided
