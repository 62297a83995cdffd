"""How a call of an expert fails. All are PeerErrors: the peer was there and answered; what the network does
is a NetworkError as ever.
"""

from __future__ import annotations

from swarm.core.errors import PeerError, UsageError


class ExpertError(PeerError):
    """Base: the peer that hosts the expert did not compute what it was asked."""


class ExpertOverloaded(ExpertError):
    """Its queue is full. Nothing was computed: another replica, or the same one a little later, can be asked.
    `queued`: requests there.
    """

    def __init__(self, text: str, queued: int = 0) -> None:
        super().__init__(text)
        self.queued = queued


class ExpertMissing(ExpertError):
    """The peer does not host this expert, or no longer: its declaration has not expired yet."""


class ExpertRefused(ExpertError, UsageError):
    """The request does not fit the expert's schema or limits; the text says where. When the server is right,
    others say the same.
    """


class ExpertFailed(ExpertError):
    """The expert's own computation failed there, or gave no usable result. A backward pass that ended so was
    not applied.
    """


class ExpertApplied(ExpertError):
    """This backward pass was applied before, and the server no longer has the gradients that it gave then."""
