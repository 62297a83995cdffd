"""Reports of progress as messages between peers."""

from __future__ import annotations

from averaging.optim.progress.logic.reports import ProgressReport
from swarm.wire import state_pb2


def read_claim(claim: state_pb2.Claim, now_s: float) -> ProgressReport:
    """Return the report in a message. Raise PeerError with the reason when it is invalid."""
    value = {
        "epoch": claim.epoch,
        "samples": claim.samples,
        "rate": claim.samples_per_s,
        "at": claim.at_s,
        "since": claim.since_s,
        "joining": claim.joining,
        "head": claim.head,
        "abstains": claim.abstains,
    }
    return ProgressReport.decode(value, now_s)


def claim_of(report: ProgressReport) -> state_pb2.Claim:
    """Return a report as a message."""
    return state_pb2.Claim(
        epoch=report.epoch,
        samples=report.samples,
        samples_per_s=report.rate,
        at_s=report.at_s,
        since_s=report.since_s,
        joining=report.joining,
        head=report.head,
        abstains=report.abstains,
    )
