"""Histories of large groups, which peers get in parts."""

from __future__ import annotations

import pytest

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.chain import Relation
from averaging.history.encoding import decode_chain, encode_part
from averaging.history.lineage import CERTIFICATES_MAX, Lineage
from averaging.optim.exchange import HISTORY, fetch_history
from swarm.core.ids import PeerId
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.uplink import Uplink
from swarm.testing.virtual_loop import run_virtual
from swarm.wire import state_pb2
from tests.averaging.history.peers import RUN, identity

BYTES_PER_S = 250_000  # of the donor's uplink: 2 Mbit/s


def grow(histories: list[Lineage], group: list[PeerId], rounds: int) -> None:
    """Extend histories by rounds of a group, whose members all vote. Signatures are not valid."""
    for _ in range(rounds):
        about = histories[0].propose(
            epoch=histories[0].epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=histories[0].epoch.to_bytes(32, "little"),
            contributors=group,
            is_break=False,
        )
        made = Certificate(
            proposal=about, result=bytes(32), votes=dict.fromkeys(group, bytes(64)), goodbyes={}
        )
        for history in histories:
            history.extend(made)


@pytest.mark.parametrize("members", [2, 32, 64])
@pytest.mark.parametrize("behind", [1, 200, CERTIFICATES_MAX - 1, CERTIFICATES_MAX + 50])
def test_a_peer_that_lags_gets_all_that_it_lacks_over_a_slow_uplink(
    members: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("averaging.history.certificate.verify", lambda *signed: True)
    group = [identity(100 + number).peer_id for number in range(members)]
    donor, own = Lineage(RUN, group[0]), Lineage(RUN, group[-1])
    grow([donor, own], group, 5)
    grow([donor], group, behind)

    async def main() -> None:
        network = SimulatedNetwork(1, LinkConfig(delay_s=0.05))
        holder, asker = network.peer(), network.peer()
        holder.uplink = Uplink(BYTES_PER_S)

        async def answer(peer: PeerId, request: state_pb2.HistoryRequest) -> state_pb2.HistoryReply:
            return state_pb2.HistoryReply(chain=encode_part(donor.chain(list(request.heads))))

        holder.handlers.unary(HISTORY, answer)
        chain = (await fetch_history(asker.caller, RUN, holder.contact, own.heads())).chain
        assert chain == donor.chain(own.heads())
        known = behind < CERTIFICATES_MAX
        assert own.relation(chain) is (Relation.AHEAD if known else Relation.UNRELATED)
        await network.close()

    run_virtual(main())


def test_a_part_has_the_first_certificates_and_at_least_one() -> None:
    group = [identity(100 + number).peer_id for number in range(64)]
    donor = Lineage(RUN, group[0])
    grow([donor], group, 40)
    found = decode_chain(encode_part(donor.chain()))
    assert (found.head, found.certificates) == (
        donor.chain().head,
        donor.chain().certificates[: len(found.certificates)],
    )
    assert 1 < len(found.certificates) < 40
