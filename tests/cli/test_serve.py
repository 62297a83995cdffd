"""`swarm serve`: the identity that it opens, and its end when a device of its experts fails."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe.server.expert_server import ServerStatistics
from swarm.cli.paths import default_identity
from swarm.cli.serve import serve, watch
from swarm.cli.serve_choices import ServeChoices
from swarm.core.errors import SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId

ROOT = Path(__file__).parents[2]
NOBODY = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"


class FailingServer:
    """A server whose device has failed at its second report."""

    failed: str | None = None

    def statistics(self) -> ServerStatistics:
        self.failed = "cuda:1 cannot be used any more until the server's process ends: CUDA error"
        return ServerStatistics(queued=0, wait_s=0.0, samples_per_s=0.0, experts={})


@pytest.mark.usefixtures("home")
def test_a_grid_is_created_with_the_identity_of_the_user_who_can_change_it_later(tmp_path: Path) -> None:
    def opened(*arguments: str) -> PeerId:
        with closing(ServeChoices.of(serve.make_context("serve", [*arguments])).open_identity()) as own:
            return own.peer_id

    experts = ["--experts", "ffn.[0:2]"]
    user = Identity.load(default_identity(), create=True)
    with closing(user), pytest.raises(UsageError, match=r"is using the identity file.*--identity new"):
        opened(*experts)
    assert opened(*experts) == user.peer_id
    assert opened(str(ROOT / "examples" / "grid.toml"), NOBODY) == user.peer_id
    chosen = opened(*experts, "--identity", str(tmp_path / "chosen"))
    assert len({user.peer_id, chosen, opened(*experts, "--identity", "new"), opened(NOBODY)}) == 4


def test_serving_ends_with_an_error_when_a_device_fails() -> None:
    shutdown = SimpleNamespace(requested=threading.Event())
    output = SimpleNamespace(emit=lambda event: None)
    with pytest.raises(SwarmError, match=r"cuda:1 cannot be used .* start `swarm serve` again"):
        watch(cast(Any, FailingServer()), cast(Any, shutdown), output, 0.001, lambda: None)
