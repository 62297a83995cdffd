"""Train one neural network together with strangers over the internet, with no master.

Everything that a user needs is a name of this package; each is loaded when it is first used, so that `import
swarm` costs nothing:

    import swarm

    with swarm.Node(bootstrap=["/ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW…"]) as node:
        averager = swarm.Averager(node, list(model.parameters()), name="demo")
        result = averager.step(timeout_s=30)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from averaging.averager import Averager, AveragerConfig, PendingRound, RoundResult
    from averaging.optim.auxiliary import AuxiliaryPeer
    from averaging.optim.muon import MuonWithAdamW
    from averaging.optim.optimizer import (
        Diloco,
        Gossip,
        Gradients,
        LoadResult,
        Local,
        Optimizer,
        OptimizerConfig,
        StepReport,
    )
    from averaging.optim.process_group import ProcessGroupOptimizer
    from averaging.reduction.lowrank import PowerSgd
    from averaging.reduction.robust import Aggregation
    from moe.classes.low_rank import ActivationSubspace
    from moe.client.downloading import DownloadedExpert
    from moe.client.finding import FoundExpert, FoundReplica, find_experts
    from moe.client.local import LocalMixtureOfExperts, LocalSequential, LocalSwitchMixtureOfExperts
    from moe.client.mixture.layer import PassReport, RemoteMixtureOfExperts
    from moe.client.mixture.switch import RemoteSwitchMixtureOfExperts, SwitchConfig
    from moe.client.pipeline.sequential import PipelineConfig, PipelineReport, RemoteSequential
    from moe.client.remote import RemoteExpert, WireCodecs
    from moe.protocol.errors import (
        ExpertApplied,
        ExpertError,
        ExpertFailed,
        ExpertMissing,
        ExpertOverloaded,
        ExpertRefused,
        ExpertStale,
    )
    from moe.server.expert_server import Expert, ExpertServer, ExpertServerConfig
    from swarm.core.errors import (
        DeadlineExceeded,
        NetworkError,
        NotEnoughPeers,
        PeerError,
        SwarmError,
        UsageError,
    )
    from swarm.core.identity import Identity
    from swarm.core.ids import Address, Contact, Key, PeerId
    from swarm.dht.service.dht_service import Entry, ManyAnswers, NamespaceRules, StoreItem, StoreResult
    from swarm.net.throttle import Bandwidth
    from swarm.node import Node, NodeConfig
    from swarm.run.task import Draw, Task, TaskData, TaskDescription

__version__ = "0.1.0"

_HOMES = {
    "ActivationSubspace": "moe.classes.low_rank",
    "Address": "swarm.core.ids",
    "Aggregation": "averaging.reduction.robust",
    "AuxiliaryPeer": "averaging.optim.auxiliary",
    "Averager": "averaging.averager",
    "AveragerConfig": "averaging.averager",
    "Bandwidth": "swarm.net.throttle",
    "Contact": "swarm.core.ids",
    "DeadlineExceeded": "swarm.core.errors",
    "Diloco": "averaging.optim.optimizer",
    "Draw": "swarm.run.task",
    "DownloadedExpert": "moe.client.downloading",
    "Entry": "swarm.dht.service.dht_service",
    "Expert": "moe.server.expert_server",
    "ExpertApplied": "moe.protocol.errors",
    "ExpertError": "moe.protocol.errors",
    "ExpertFailed": "moe.protocol.errors",
    "ExpertMissing": "moe.protocol.errors",
    "ExpertOverloaded": "moe.protocol.errors",
    "ExpertRefused": "moe.protocol.errors",
    "ExpertServer": "moe.server.expert_server",
    "ExpertServerConfig": "moe.server.expert_server",
    "ExpertStale": "moe.protocol.errors",
    "FoundExpert": "moe.client.finding",
    "FoundReplica": "moe.client.finding",
    "Gossip": "averaging.optim.optimizer",
    "Gradients": "averaging.optim.optimizer",
    "Identity": "swarm.core.identity",
    "Key": "swarm.core.ids",
    "LoadResult": "averaging.optim.optimizer",
    "Local": "averaging.optim.optimizer",
    "LocalMixtureOfExperts": "moe.client.local",
    "LocalSequential": "moe.client.local",
    "LocalSwitchMixtureOfExperts": "moe.client.local",
    "ManyAnswers": "swarm.dht.service.dht_service",
    "MuonWithAdamW": "averaging.optim.muon",
    "NamespaceRules": "swarm.dht.logic.rules",
    "NetworkError": "swarm.core.errors",
    "Node": "swarm.node",
    "NodeConfig": "swarm.node",
    "NotEnoughPeers": "swarm.core.errors",
    "Optimizer": "averaging.optim.optimizer",
    "OptimizerConfig": "averaging.optim.optimizer",
    "PassReport": "moe.client.mixture.layer",
    "PeerError": "swarm.core.errors",
    "PeerId": "swarm.core.ids",
    "PendingRound": "averaging.averager",
    "PipelineConfig": "moe.client.pipeline.sequential",
    "PipelineReport": "moe.client.pipeline.sequential",
    "PowerSgd": "averaging.reduction.lowrank",
    "ProcessGroupOptimizer": "averaging.optim.process_group",
    "RemoteExpert": "moe.client.remote",
    "RemoteMixtureOfExperts": "moe.client.mixture.layer",
    "RemoteSequential": "moe.client.pipeline.sequential",
    "RemoteSwitchMixtureOfExperts": "moe.client.mixture.switch",
    "RoundResult": "averaging.averager",
    "StepReport": "averaging.optim.optimizer",
    "StoreItem": "swarm.dht.service.dht_service",
    "StoreResult": "swarm.dht.service.dht_service",
    "SwarmError": "swarm.core.errors",
    "Task": "swarm.run.task",
    "TaskData": "swarm.run.task",
    "TaskDescription": "swarm.run.task",
    "SwitchConfig": "moe.client.mixture.switch",
    "UsageError": "swarm.core.errors",
    "WireCodecs": "moe.client.remote",
    "find_experts": "moe.client.finding",
}

__all__ = [
    "ActivationSubspace",
    "Address",
    "Aggregation",
    "AuxiliaryPeer",
    "Averager",
    "AveragerConfig",
    "Bandwidth",
    "Contact",
    "DeadlineExceeded",
    "Diloco",
    "DownloadedExpert",
    "Draw",
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
    "ExpertStale",
    "FoundExpert",
    "FoundReplica",
    "Gossip",
    "Gradients",
    "Identity",
    "Key",
    "LoadResult",
    "Local",
    "LocalMixtureOfExperts",
    "LocalSequential",
    "LocalSwitchMixtureOfExperts",
    "ManyAnswers",
    "MuonWithAdamW",
    "NamespaceRules",
    "NetworkError",
    "Node",
    "NodeConfig",
    "NotEnoughPeers",
    "Optimizer",
    "OptimizerConfig",
    "PassReport",
    "PeerError",
    "PeerId",
    "PendingRound",
    "PipelineConfig",
    "PipelineReport",
    "PowerSgd",
    "ProcessGroupOptimizer",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSequential",
    "RemoteSwitchMixtureOfExperts",
    "RoundResult",
    "StepReport",
    "StoreItem",
    "StoreResult",
    "SwarmError",
    "SwitchConfig",
    "Task",
    "TaskData",
    "TaskDescription",
    "UsageError",
    "WireCodecs",
    "__version__",
    "find_experts",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
