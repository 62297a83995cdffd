"""A donor copies a state during a long download, so that the next writer does not have to."""

from __future__ import annotations

import pytest

from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from tests.sim.donors import donor, joining, play, state_of


# the donor has sent five of eight chunks after 0.6 s: what is left would take 0.4 s more
@pytest.mark.parametrize(
    ("copy_after_s", "copy_worth_s", "copied"), [(0.5, 0.2, True), (0.5, 5.0, False), (60.0, 0.2, False)]
)
def test_a_long_download_is_served_from_a_concurrent_copy(
    copy_after_s: float, copy_worth_s: float, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("averaging.optim.state.donor.COPY_AFTER_S", copy_after_s)
    monkeypatch.setattr("averaging.optim.state.donor.COPY_WORTH_S", copy_worth_s)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        state = state_of(1)
        giving = donor(peers[0], state)
        settled: list[bool] = []
        download = joining(
            joiner,
            state_of(2),
            on_progress=lambda *_: settled.extend(view.is_copied for view in giving.leased_views()),
        )
        fetched = await download.fetch([peers[0].contact], 60)
        assert not settled[0]
        assert settled[-1] == copied, "the next writer has nothing left to copy, if the copy was worth it"
        assert fetched.digest == state.snapshot().digest

    play(scenario, donors=1)
