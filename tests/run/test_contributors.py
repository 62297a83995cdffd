"""Totals of a run from the histories of its members: what they leave out in a run of several groups."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from averaging.history.lineage import Lineage
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Contact
from swarm.run.contributors import RunTotals, totals_of
from tests.averaging.history.peers import PEERS, RUN, certificate, upon


def totals(histories: dict[Contact, Any]) -> RunTotals:
    class Caller:
        async def call(self, *given: Any, **options: Any) -> Any:
            raise NetworkError("no receipt")

    caller: Any = Caller()
    return asyncio.run(totals_of(caller, RUN, histories))


@pytest.mark.parametrize(("grid_rounds", "is_partial"), [(1, False), (2, True)])
def test_totals_of_a_run_with_several_groups_are_partial(grid_rounds: int, is_partial: bool) -> None:
    history = Lineage(RUN, PEERS[0])
    about = replace(upon(history, PEERS[:3]), samples=(10, 20, 30), grid_rounds=grid_rounds)
    history.extend(certificate(about, PEERS[:3]))
    silent: SwarmError = NetworkError("no answer in time")
    found = totals({Contact(PEERS[1]): silent, Contact(PEERS[0]): history.chain()})
    assert found.is_partial == is_partial
    assert [found.totals.by_peer[peer].samples for peer in PEERS[:3]] == [10, 20, 30]


def test_a_reader_is_told_why_no_member_gave_a_history() -> None:
    with pytest.raises(PeerError, match="could not be read: no answer in time"):
        totals({Contact(PEERS[0]): NetworkError("no answer in time")})
    with pytest.raises(PeerError, match="no member of the run is known"):
        totals({})
