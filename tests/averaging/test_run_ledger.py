"""The ledger of a run with its copy on disk, and the certificates that it counts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from averaging.history.certificate import RoundKind, Vote, make_result, vote_statement
from averaging.history.lineage import Lineage
from averaging.history.receipts import RECEIPT_BYTES_MAX, RECEIPT_INTERVAL
from averaging.history.tally import Tally
from averaging.run_ledger import RunLedger
from swarm.core.standing import PeerStanding
from swarm.testing.identities import SeededIdentity

RUN = "r"
OWN, OTHER, STRANGER = SeededIdentity(0), SeededIdentity(1), SeededIdentity(2)


@dataclass
class Clock:
    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def swarm_s(self) -> float:
        return self.now_s


def ledger(path: Path | None = None, standing: PeerStanding | None = None) -> RunLedger:
    return RunLedger(OWN.peer_id, RUN, Clock(), standing or PeerStanding(), path)


def certify_alone(lineage: Lineage, one: SeededIdentity) -> None:
    """Extend a history of one peer by an epoch."""
    lineage.extend(
        lineage.alone(
            epoch=lineage.epoch + 1, kind=RoundKind.EPOCH, group_id=bytes(32), is_break=False, sign=one.sign
        )
    )


def test_each_certificate_is_counted_once_and_its_electors_are_members() -> None:
    standing, lineage = PeerStanding(), Lineage(RUN, OTHER.peer_id)
    one = ledger(standing=standing)
    for count in range(1, 4):
        certify_alone(lineage, OTHER)
        one.follow(lineage)
        one.follow(lineage)
        assert one.rounds == count
    assert standing.is_member(OTHER.peer_id, RUN)
    assert one.has_standing(OTHER.peer_id)
    assert not one.has_standing(OWN.peer_id)


@pytest.mark.parametrize("works", [False, True])
def test_a_contributor_that_sent_nothing_is_no_member(works: bool) -> None:
    """Regression test: a stranger that sent nothing in three groups became an elector, and from then on its
    claims of samples filled the epochs. Since certificates tell who worked, it is not even an elector.
    """
    standing, lineage = PeerStanding(), Lineage(RUN, OTHER.peer_id)
    certify_alone(lineage, OTHER)
    contributors, one = [OTHER, STRANGER], ledger(standing=standing)
    proposal = lineage.propose(
        epoch=2,
        kind=RoundKind.EPOCH,
        group_id=bytes(32),
        contributors=[each.peer_id for each in contributors],
        is_break=False,
    )
    tally = Tally(proposal, lineage.electors, lineage.register)
    result = make_result(bytes(32), [] if works else [1], 2)
    for each in contributors:
        signature = each.sign(vote_statement(proposal.digest(), result))
        tally.add(Vote(voter=each.peer_id, result=result, signature=signature))
    assert tally.certificate is not None
    lineage.extend(tally.certificate)
    assert (STRANGER.peer_id in lineage.electors) is works
    for _ in range(2):
        one.follow(lineage)
        assert standing.is_member(STRANGER.peer_id, RUN) is works
        assert standing.is_member(OTHER.peer_id, RUN)


@pytest.mark.parametrize("contributes", [False, True])
def test_a_fault_in_a_failed_round_is_forgotten_when_others_commit_the_head_without_this_peer(
    contributes: bool,
) -> None:
    """Regression: a member of two that had voted for the round of a third one left this peer's, which blamed
    it for 4 and then 16 rounds.
    """
    lineage, one = Lineage(RUN, OTHER.peer_id), ledger()
    certify_alone(lineage, OTHER)
    one.follow(lineage)
    one.fault(OTHER.peer_id, "it lives, but has not begun this round", committed=False)
    retried = one.precedence([OTHER.peer_id], passes_over=False)
    assert retried.is_doubted(OTHER.peer_id)
    proposal = lineage.propose(
        epoch=2,
        kind=RoundKind.EPOCH,
        group_id=bytes(32),
        contributors=[OTHER.peer_id, *([OWN.peer_id] if contributes else [])],
        is_break=False,
    )
    tally = Tally(proposal, lineage.electors, lineage.register)
    result = make_result(bytes(32), [], len(proposal.contributors))
    for each in (OTHER, OWN)[: len(proposal.contributors)]:
        signature = each.sign(vote_statement(proposal.digest(), result))
        tally.add(Vote(voter=each.peer_id, result=result, signature=signature))
    assert tally.certificate is not None
    lineage.extend(tally.certificate)
    one.follow(lineage)
    after = one.precedence([OTHER.peer_id])
    assert after.is_doubted(OTHER.peer_id) is after.is_passed_over(OTHER.peer_id) is contributes


def test_a_fault_in_a_failed_round_is_forgotten_when_this_peer_follows_another_history() -> None:
    """Regression test: the oldest certificate of the other history decided whether it counted."""
    left, followed, one = Lineage(RUN, OTHER.peer_id), Lineage(RUN, OWN.peer_id), ledger()
    certify_alone(left, OTHER)
    certify_alone(followed, OWN)
    one.follow(left)
    one.fault(OTHER.peer_id, "it stalled", committed=False)
    one.follow(followed)
    assert not one.precedence([OTHER.peer_id]).is_doubted(OTHER.peer_id)


def test_a_fault_in_a_failed_round_counts_in_the_next_search_on_the_same_head() -> None:
    one = ledger()
    one.fault(OTHER.peer_id, "it stalled", committed=False)
    assert one.precedence([OTHER.peer_id]).is_passed_over(OTHER.peer_id)


def test_a_restarted_process_remembers_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "identity.ledger.r"
    one = ledger(path)
    one.contributed({OTHER.peer_id: 3.0})
    one.save()
    assert not path.exists(), "at most once a minute"
    one.save(now=True)
    assert ledger(path).has_standing(OTHER.peer_id)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 9}', b"[" * 100_000, b"\xff\xfe"])
def test_a_damaged_copy_is_set_aside_with_one_sentence(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "identity.ledger.r"
    path.write_bytes(content)
    caplog.set_level(logging.WARNING)
    one = ledger(path)
    assert not one.has_standing(OTHER.peer_id)
    [record] = caplog.records
    assert "is damaged and cannot be read" in record.getMessage()
    assert not path.exists()
    assert (tmp_path / "identity.ledger.r.damaged").read_bytes() == content
    one.contributed({OTHER.peer_id: 3.0})
    one.save(now=True)
    assert ledger(path).has_standing(OTHER.peer_id)


def with_a_receipt(path: Path, run: str, lineage: Lineage) -> RunLedger:
    """Return a ledger of a run whose only elector has signed a receipt, after saving it."""
    one = RunLedger(OWN.peer_id, run, Clock(), PeerStanding(), path)
    for _ in range(RECEIPT_INTERVAL):
        certify_alone(lineage, OWN)
    one.follow(lineage)
    one.with_receipts(lambda book: book.sign(OWN.sign))
    one.save(now=True)
    return one


def test_runs_of_one_identity_keep_their_receipts_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lineages = {run: Lineage(run, OWN.peer_id) for run in ("r", "s")}
    paths = {run: tmp_path / f"identity.ledger.{run}" for run in lineages}
    for run, lineage in lineages.items():
        with_a_receipt(paths[run], run, lineage)
    for run, lineage in lineages.items():
        again = RunLedger(OWN.peer_id, run, Clock(), PeerStanding(), paths[run])
        again.follow(lineage)
        newest = again.with_receipts(lambda book: book.newest)
        assert newest is not None
        assert newest.run == run
    assert not caplog.records


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, bytes(RECEIPT_BYTES_MAX + 9), b"\x93\x01\x02\x03"]
)
def test_a_damaged_receipt_is_set_aside_and_the_ledger_is_kept(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "identity.ledger.r"
    one = ledger(path)
    one.contributed({OTHER.peer_id: 3.0})
    one.save(now=True)
    path.with_name("identity.ledger.r.receipt").write_bytes(content)
    again = ledger(path)
    assert again.has_standing(OTHER.peer_id)
    [record] = caplog.records
    assert "is damaged and cannot be read" in record.getMessage()
    assert path.with_name("identity.ledger.r.receipt.damaged").read_bytes() == content


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = ledger(tmp_path / "missing" / "ledger")
    one.contributed({OTHER.peer_id: 3.0})
    one.save(now=True)
    assert "cannot be written" in caplog.text
