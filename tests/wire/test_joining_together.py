"""Several newcomers at once on real sockets: all load the state and contribute."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from averaging.optim.reports import LoadResult
from tests.wire.trainers import Peer, one_more, swarm_of, together

TARGET = 480  # epochs that are long enough for a newcomer to take part in the one whose state it loads


@pytest.mark.parametrize(("trainers", "newcomers"), [(1, 3), (2, 6)])
def test_newcomers_that_come_at_once_all_load_the_state_and_contribute(trainers: int, newcomers: int) -> None:
    run = f"at once {trainers} {newcomers}"
    with swarm_of(trainers, run, target_batch_size=TARGET) as peers, ExitStack() as stack:
        together([lambda peer=peer: peer.train_to(8) for peer in peers])  # type: ignore[misc]
        late = [
            stack.enter_context(one_more(peers, run, 10 + n, seed=90 + n, target_batch_size=TARGET))
            for n in range(newcomers)
        ]
        ended = threading.Event()
        loads: dict[int, LoadResult] = {}

        def train(peer: Peer) -> None:
            while not ended.is_set():
                peer.train_once()

        def join(peer: Peer) -> None:
            loads[peer.number] = peer.opt.load_state_from_peers(timeout_s=60)
            while not any(report.contributed for report in peer.reports) and not ended.is_set():
                peer.train_once()
            train(peer)

        def end() -> None:
            try:
                while not ended.wait(0.05):
                    if all(any(report.contributed for report in peer.reports) for peer in late):
                        return
            finally:
                ended.set()

        together(
            [lambda peer=peer: train(peer) for peer in peers]  # type: ignore[misc]
            + [lambda peer=peer: join(peer) for peer in late]  # type: ignore[misc]
            + [end]
        )
        assert all(load.loaded for load in loads.values()), loads
