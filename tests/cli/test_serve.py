"""`swarm serve` ends when a device of its experts cannot be used any more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe.server.expert_server import ServerStatistics
from swarm.cli.serve import watch
from swarm.core.errors import SwarmError


class FailingServer:
    """A server whose device has failed at its second report."""

    failed: str | None = None

    def statistics(self) -> ServerStatistics:
        self.failed = "cuda:1 cannot be used any more until the server's process ends: CUDA error"
        return ServerStatistics(queued=0, wait_s=0.0, samples_per_s=0.0, experts={})


def test_serving_ends_with_an_error_when_a_device_fails() -> None:
    shutdown = SimpleNamespace(requested=threading.Event())
    output = SimpleNamespace(emit=lambda event: None)
    with pytest.raises(SwarmError, match=r"cuda:1 cannot be used .* start `swarm serve` again"):
        watch(cast(Any, FailingServer()), cast(Any, shutdown), output, 0.001, lambda: None)
