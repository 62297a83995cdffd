"""The errors that users of swarm see. Each class says whose fault it is; the text says what was tried and
what to do next.
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of every error that swarm raises on purpose."""


class UsageError(SwarmError, ValueError):
    """The caller made a mistake: a wrong argument, a file that cannot be read, a call on a closed node."""


class PeerError(SwarmError):
    """A remote peer broke the protocol, or refused a request and said why."""


class NetworkError(SwarmError, ConnectionError):
    """The network failed: no peer answers, the connection broke, or every address failed."""


class DeadlineExceeded(NetworkError, TimeoutError):
    """An operation did not finish by its deadline."""


class NotEnoughPeers(SwarmError):
    """The operation needs more live peers than were found."""


class NotInvited(PeerError):
    """A peer answers only those that were invited to its run, and this peer showed no valid capability."""
