"""The promises that a peer makes by its votes on one head. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from averaging.history.certificate import Proposal

# attempts on one head in which a peer votes for none; in further ones it does not vote
_CLOSED_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Promises:
    """The votes of one peer on its present head, as far as they bind it. A value: each vote makes another.

    An attempt is named by the digest of its proposal: a leader may give two groups the same name.
    """

    attempt: bytes = b""  # attempt in which it voted for a result that may still be certified; b"": none
    result: bytes = b""  # the result that it voted for there
    has_ended: bool = False  # that attempt has ended for this peer without a known result
    closed: frozenset[bytes] = frozenset()  # attempts in which it votes for no result any more
    declined: frozenset[bytes] = frozenset()  # the subset in which it voted for none

    def refusal(self, proposal: Proposal, result: bytes) -> str:
        """Return why this peer must not vote for `result` (b"": for none) of this proposal; "" when it
        may.
        """
        if not self.attempt and not self.closed:
            return ""
        attempt = proposal.digest()
        if attempt in self.declined and not result:
            return ""  # the vote is repeated because the first one may have been lost
        if attempt in self.closed:
            return "this peer has voted for none in this attempt, or has found that it failed"
        if not result and (len(self.closed) == _CLOSED_MAX or self.attempt == attempt):
            return "this peer has voted for a result in this attempt, or in too many others"
        is_other = self.attempt and (self.attempt, self.result) != (attempt, result)
        if result and is_other and not proposal.is_break:
            return "this peer has voted in another attempt on this head, which may have been committed"
        return ""

    def voted(self, proposal: Proposal, result: bytes, *, outside: bool) -> Promises:
        """Return what binds this peer after a vote that `refusal` allows. One for none binds in this attempt
        only, and one for a break in none. `outside`: this peer is not in the attempt's group.
        """
        if not result:
            attempt = {proposal.digest()}
            return replace(self, closed=self.closed | attempt, declined=self.declined | attempt)
        if proposal.is_break or proposal.digest() == self.attempt:
            return self
        return replace(self, attempt=proposal.digest(), result=result, has_ended=outside)

    def ended(self, proposal: Proposal | None) -> Promises:
        """Return what binds this peer after this attempt, or any (None), has ended here without outcome."""
        is_over = bool(self.attempt) if proposal is None else self.binds(proposal)
        return replace(self, has_ended=True) if is_over else self

    def released(self, proposal: Proposal) -> Promises:
        """Return what binds this peer once nobody can commit this attempt any more."""
        if not self.binds(proposal):
            return self
        return Promises(closed=self.closed | {self.attempt}, declined=self.declined)

    def binds(self, proposal: Proposal) -> bool:
        """Return whether the vote in this attempt may still become a certificate."""
        return bool(self.attempt) and proposal.digest() == self.attempt
