"""Strangers train one neural network together over the internet, with no master.

Everything that a user needs is a name of this package; each is loaded when it is first used, so that `import swarm` costs nothing:

    import swarm

    with swarm.Node(bootstrap=["/ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW…"]) as node:
        averager = swarm.Averager(node, list(model.parameters()), name="demo")
        result = averager.step(timeout_s=30)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from averaging.averager import Averager, AveragerConfig, AveragingResult, PendingRound
    from averaging.optimizer import LoadResult, Optimizer, OptimizerConfig, StepReport
    from moe.errors import ExpertApplied, ExpertError, ExpertFailed, ExpertMissing, ExpertOverloaded, ExpertRefused
    from moe.remote import RemoteExpert, Travel
    from moe.server import Expert, ExpertServer, ExpertServerConfig
    from swarm.dht.service import Entry, ManyAnswers, NamespaceRules, StoreItem, StoreResult
    from swarm.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, PeerError, SwarmError, UsageError
    from swarm.identity import Identity
    from swarm.ids import Address, Contact, Key, PeerId
    from swarm.node import Node, NodeConfig

__version__ = "0.1.0"

_HOMES = {
    "Address": "swarm.ids",
    "Averager": "averaging.averager",
    "AveragerConfig": "averaging.averager",
    "AveragingResult": "averaging.averager",
    "Contact": "swarm.ids",
    "DeadlineExceeded": "swarm.errors",
    "Entry": "swarm.dht.service",
    "Expert": "moe.server",
    "ExpertApplied": "moe.errors",
    "ExpertError": "moe.errors",
    "ExpertFailed": "moe.errors",
    "ExpertMissing": "moe.errors",
    "ExpertOverloaded": "moe.errors",
    "ExpertRefused": "moe.errors",
    "ExpertServer": "moe.server",
    "ExpertServerConfig": "moe.server",
    "Identity": "swarm.identity",
    "Key": "swarm.ids",
    "LoadResult": "averaging.optimizer",
    "ManyAnswers": "swarm.dht.service",
    "NamespaceRules": "swarm.dht.rules",
    "NetworkError": "swarm.errors",
    "Node": "swarm.node",
    "NodeConfig": "swarm.node",
    "NotEnoughPeers": "swarm.errors",
    "Optimizer": "averaging.optimizer",
    "OptimizerConfig": "averaging.optimizer",
    "PeerError": "swarm.errors",
    "PeerId": "swarm.ids",
    "PendingRound": "averaging.averager",
    "RemoteExpert": "moe.remote",
    "StepReport": "averaging.optimizer",
    "StoreItem": "swarm.dht.service",
    "StoreResult": "swarm.dht.service",
    "SwarmError": "swarm.errors",
    "Travel": "moe.remote",
    "UsageError": "swarm.errors",
}

__all__ = [
    "Address",
    "Averager",
    "AveragerConfig",
    "AveragingResult",
    "Contact",
    "DeadlineExceeded",
    "Entry",
    "Expert",
    "ExpertApplied",
    "ExpertError",
    "ExpertFailed",
    "ExpertMissing",
    "ExpertOverloaded",
    "ExpertRefused",
    "ExpertServer",
    "ExpertServerConfig",
    "Identity",
    "Key",
    "LoadResult",
    "ManyAnswers",
    "NamespaceRules",
    "NetworkError",
    "Node",
    "NodeConfig",
    "NotEnoughPeers",
    "Optimizer",
    "OptimizerConfig",
    "PeerError",
    "PeerId",
    "PendingRound",
    "RemoteExpert",
    "StepReport",
    "StoreItem",
    "StoreResult",
    "SwarmError",
    "Travel",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
