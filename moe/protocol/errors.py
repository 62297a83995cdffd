"""Errors of expert calls. All are PeerErrors, which means that the peer answered; failures of the network are
NetworkErrors.
"""

from __future__ import annotations

from swarm.core.errors import NotInvited, PeerError, UsageError


class ExpertError(PeerError):
    """Base class: the peer that hosts the expert did not compute the request."""


class ExpertOverloaded(ExpertError):
    """The server's queue is full and nothing was computed. Another replica can be asked, or the same one a
    little later. `queued` is the number of requests that wait there.
    """

    def __init__(self, text: str, queued: int = 0) -> None:
        super().__init__(text)
        self.queued = queued


class ExpertMissing(ExpertError):
    """The peer does not host this expert, or no longer does and its declaration has not expired yet."""


class ExpertRefused(ExpertError, UsageError):
    """The request does not fit the expert's schema or limits; the text says where. If the server is right,
    other replicas refuse as well.
    """


class ExpertNotInvited(ExpertRefused, NotInvited):
    """Only invited peers train this expert. The backward pass was not applied."""


class ExpertFailed(ExpertError):
    """The expert's own computation failed, or gave no usable result. A backward pass that ended this way was
    not applied.
    """


class ExpertStale(ExpertError):
    """The expert has changed since the forward pass by more versions than `staleness_max` allows, or has gone
    back to an earlier one after a restart. The backward pass was not applied.
    """


class ExpertApplied(ExpertError):
    """This backward pass was applied before, and the server no longer has the gradients that it returned
    then.
    """
