"""The errors that users of swarm see. Each says whose fault it is; its text says what was tried and what to
do next.
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of every error that swarm raises on purpose."""


class UsageError(SwarmError, ValueError):
    """The caller's fault: a wrong argument, a file that cannot be read, a call on a closed node."""


class PeerError(SwarmError):
    """A remote peer broke the protocol, or refused a request and said why."""


class NetworkError(SwarmError, ConnectionError):
    """The network's fault: nobody answers, the connection broke, every address failed."""


class DeadlineExceeded(NetworkError, TimeoutError):
    """An operation did not finish by its deadline."""


class NotEnoughPeers(SwarmError):
    """The operation needs more live peers than were found."""
