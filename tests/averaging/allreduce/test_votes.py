"""The votes at the end of a round, at their limits."""

from __future__ import annotations

from averaging.allreduce.commit import BALLOTS_MAX, Ballot, Next, Votes

A, B = bytes(32), bytes([1]) * 32


def test_after_the_last_ballot_there_is_none() -> None:
    votes = Votes(range(2), 0, lambda place: f"peer {place}")
    for number in (BALLOTS_MAX - 1, BALLOTS_MAX):
        assert votes.verdict() is None
        for place, digest in enumerate((A, B)):
            votes.add(Ballot(place=place, number=number, digest=digest))
        assert votes.next() is Next.RESOLVE
    verdict = votes.verdict()
    assert verdict is not None
    assert "different averages" in str(verdict.failure)
