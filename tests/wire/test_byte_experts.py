"""Two volunteers train the byte-level model with experts in place of its feed-forward layers."""

from __future__ import annotations

from swarm.node import Node
from swarm.run import events
from tests.wire.volunteers import HERE, TABLE, VolunteerThread, created_run


def test_two_volunteers_train_one_model_with_experts() -> None:
    settings = {"width": 16, "layers": 1, "heads": 2, "context": 16, "experts": 4, "data_bytes": 1 << 16}
    task = {"name": "bytelm", "settings": settings}
    with created_run(**{**TABLE, "task": task, "mode": "diloco"}) as (node, _, signed):
        other = Node(bootstrap=node.addresses, listen=HERE)
        try:
            peers = [VolunteerThread(node, signed, new=True), VolunteerThread(other, signed, new=False)]
            digests: list[dict[int, str | None]] = []
            for one in peers:
                one.wait(events.EpochDone, lambda event: event.peers == 2 and event.epoch >= 4)
                done = [event for event in one.events if isinstance(event, events.EpochDone)]
                digests.append({event.epoch: event.digest for event in done if event.peers == 2})
            common = digests[0].keys() & digests[1].keys()
            assert common
            assert all(digests[0][epoch] == digests[1][epoch] for epoch in common)
            for one in peers:
                one.stop.set()
            for one in peers:
                one.end()
        finally:
            other.close()
