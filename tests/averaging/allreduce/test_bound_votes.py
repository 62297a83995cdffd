"""A member whose round fails although its vote is in the certificate: the vote still binds it."""

from __future__ import annotations

from dataclasses import replace

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.values import CallFailure, Statement
from averaging.allreduce.logic.versions import digest_payload, digest_round, encode_places
from averaging.history.certificate import Vote, vote_statement
from swarm.testing.identities import SeededIdentity
from tests.averaging.allreduce.setups import CHUNK_BYTES, round_setup

IDENTITIES = [SeededIdentity(f"bound {place}") for place in range(5)]  # the last two are in no group
EVERYBODY = encode_places(range(3), 3)
DIGESTS = [digest_payload(bytes([chunk])) for chunk in range(3)]


def test_a_vote_in_a_certificate_binds_although_its_averages_cannot_be_had() -> None:
    """The member votes as an elector for the others' result before its last average arrives. If it were
    released from that vote, two electors elsewhere could make a second certificate with it.
    """
    setup = round_setup(IDENTITIES[:3])
    setup = replace(setup, electors=tuple(one.peer_id for one in IDENTITIES))
    result = digest_round((digest, EVERYBODY) for digest in DIGESTS)
    statement = vote_statement(setup.proposal.digest(), result)
    votes = [Vote(voter=one.peer_id, result=result, signature=one.sign(statement)) for one in IDENTITIES[:3]]
    machine = RoundMachine(setup)
    effects = machine.begin()

    def step(event: on.Event) -> None:
        for effect in machine.step(event, 0.0):
            effects.append(effect)
            if isinstance(effect, do.Sign):
                step(on.VoteSigned(votes[0]))
            elif isinstance(effect, do.Ping | do.AskInventory):
                step(on.CallFailed(effect, CallFailure.BROKEN, "it is cut off"))

    step(on.MemoryPrepared())
    for sender in (1, 2):
        step(on.SenderOpened(sender))
        step(on.ContributionArrived(sender, 0, CHUNK_BYTES))
    step(on.ChunkReduced(0, EVERYBODY, DIGESTS[0], b""))
    step(on.AverageArrived(1, 1, EVERYBODY, b"", CHUNK_BYTES))
    step(on.AverageChecked(1, DIGESTS[1]))
    step(on.VotesAsked(1, 1, Statement((votes[1], votes[2]))))
    assert do.Sign(result) in effects  # its last average is on its way
    step(on.ReducerStreamEnded(2, "it is cut off", broken=True))
    finish = machine.finished
    assert finish is not None
    assert finish.failure is not None
    assert finish.certificate is not None
    assert machine.votes.own_vote == votes[0]
    assert finish.unresolved
