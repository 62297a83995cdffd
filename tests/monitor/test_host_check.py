"""The monitor's page answers under addresses and names of its machine only."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from starlette.applications import Starlette

from swarm.monitor.web import HostCheck, names_this_machine


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "192.0.2.7", socket.gethostname()],
)
def test_a_request_by_address_or_own_name_is_answered(host: str) -> None:
    assert names_this_machine(host)


@pytest.mark.parametrize(
    "host", ["", "attacker.example", "127.0.0.1.attacker.example:8000", "[::1", "127.0.0.1@attacker.example"]
)
def test_a_request_under_a_foreign_name_is_refused(host: str) -> None:
    assert not names_this_machine(host)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    asyncio.run(HostCheck(Starlette())(scope, receive, send))
    assert sent[0]["status"] == 421
