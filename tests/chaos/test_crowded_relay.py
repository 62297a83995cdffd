"""Twenty hidden peers at one relay whose link carries 50 Mbit/s, in network namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.chaos.crowd_averaging import CROWD_AVERAGING
from tests.chaos.namespaces import Internet, missing
from tests.chaos.reach_peers import CROWD, entry_point

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(shutil.which("tc") is None, reason="tc not installed"),
]
PEERS, MBIT = 20, 50
ROUNDS = 3
BYTES = 1_000_000  # that each peer sends to the next one, which sends them back


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def test_twenty_hidden_peers_share_a_relay_evenly_and_lose_no_connection(internet: Internet) -> None:
    _, address = entry_point(internet)
    internet.limit("r", MBIT)
    internet.behind_router("crowd", "symmetric")
    host, peer_id = address.split("/")[2], address.rpartition("/")[2]
    crowd = internet.start("crowd", "-c", CROWD, peer_id, host, str(PEERS), str(BYTES))
    crowd.wait("reservations", lambda event: event["event"] == "reserved")
    done = crowd.wait("exchange", lambda event: event["event"] == "exchanged", 240.0)
    least_s = (
        2 * PEERS * BYTES / (MBIT * 125_000)
    )  # there and back, each once into the relay and once out of it
    assert done["held"] == PEERS
    assert done["seconds"] > 0.9 * least_s
    assert done["seconds"] < 3 * least_s, done
    assert min(done["each"]) > 0.3 * max(done["each"]), done


def test_twenty_hidden_peers_at_one_relay_average_in_one_group(internet: Internet) -> None:
    _, address = entry_point(internet)
    internet.limit("r", MBIT)
    internet.behind_router("crowd", "symmetric")
    crowd = internet.start("crowd", "-c", CROWD_AVERAGING, address, str(PEERS), str(ROUNDS))
    assert crowd.wait("relays", lambda event: event["event"] == "reached")["direct"] == 0
    crowd.wait("rounds", lambda event: event["event"] == "averaged", 70.0 * ROUNDS)
    rounds = [event for event in crowd.events if event["event"] == "round"]
    whole = {"failed": False, "members": PEERS, "values": [(PEERS - 1) / 2], "accused": 0}
    assert [{name: one[name] for name in whole} for one in rounds] == [whole] * PEERS * ROUNDS, rounds
