"""A peer that gives a state of a run, and takes part in it in no other way."""

from __future__ import annotations

from averaging.optim.exchange import RunExchange
from averaging.optim.state.donor import Donor
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.node import Node
from swarm.wire import state_pb2


class _TakesNoReports:
    async def on_report(self, peer: PeerId, request: state_pb2.ReportRequest) -> state_pb2.ReportReply:
        raise PeerError("no")


def lone_donor(node: Node, run: str, state: TrainingState) -> Donor:
    """Return the donor of a state, true or false, on a node; call `start`, and it answers."""
    donor = Donor(node, run, state)
    exchange: RunExchange = node.service(RunExchange.from_node)
    exchange.add(run, _TakesNoReports(), donor)  # type: ignore[arg-type]
    return donor
