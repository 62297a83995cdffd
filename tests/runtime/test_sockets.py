"""The sockets of this process, listed again and again."""

from __future__ import annotations

import os
import socket

import pytest

from swarm.runtime import sockets
from swarm.runtime.sockets import SocketList


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return a listening socket, a connection to it, and the accepted end."""
    listening = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listening.getsockname())
    far, _ = listening.accept()
    return listening, near, far


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list descriptors")
def test_a_connection_that_was_there_before_is_only_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, near, far = pair()
    listed, looked, look_up = SocketList(), list[int](), sockets._socket_of

    def counted(descriptor: int) -> sockets.OpenSocket | None:
        looked.append(descriptor)
        return look_up(descriptor)

    monkeypatch.setattr(sockets, "_socket_of", counted)
    with listening, near, far:
        for _ in range(3):
            found = {one.descriptor: one for one in listed.open_now()}
            assert found[near.fileno()].remote == listening.getsockname()
            assert found[far.fileno()].remote == near.getsockname()
            assert found[listening.fileno()].remote is None
        assert looked.count(near.fileno()) == looked.count(far.fileno()) == 1
        other, later, last = pair()
        with other, later, last:
            os.dup2(later.fileno(), near.fileno())  # another connection takes the number
            again = {one.descriptor: one for one in listed.open_now()}
            assert again[near.fileno()].remote == other.getsockname()
