"""The common part of `download` and `to_local` of the layers of remote experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from moe.classes import ExpertSettings, expert_class, make
from moe.client.downloading import (
    BYTES_MAX,
    DownloadedExpert,
    ExpertNeed,
    Progress,
    download_experts,
    find_hosted,
)
from moe.client.replicas.together import run_together
from moe.protocol.calls import Description, ExpertCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, UsageError
from swarm.core.wording import size

if TYPE_CHECKING:
    from swarm.node import Node

# the name of an expert -> a new module like that of its server
ModuleFactory: TypeAlias = Callable[[str], nn.Module]

_DESCRIBED_BY = 3  # servers that say what class an expert is
_DESCRIBE_S = 10.0
_MARGIN_S = 10.0


def ignore(done: int, total: int, name: str) -> None:
    """Show no progress."""


def download(node: Node, pattern: str, on_progress: Progress = ignore) -> dict[str, DownloadedExpert]:
    """Return the parameters of all existing experts that match a pattern, by name. Raises
    NotEnoughPeers when there is none, or no server gives one of them.
    """
    return download_experts(node, _existing(node, pattern), on_progress=on_progress)


def download_modules(
    node: Node,
    pattern: str,
    make_module: ModuleFactory | None = None,
    on_progress: Progress = ignore,
) -> dict[str, nn.Module]:
    """Return all existing experts that match a pattern as local modules, by name. `make_module` returns a new
    module like that of an expert; None: of the class that the servers name, which this machine must have.

    Raises NotEnoughPeers when there is none, or no server gives one of them, and UsageError when it is not
    known what module an expert is.
    """
    hosted = _existing(node, pattern)
    if make_module is None:
        uid, replicas = next(iter(hosted.items()))
        make_module = node.network.run(_class_of(node, uid, replicas), _DESCRIBE_S + _MARGIN_S)
    modules = {str(uid): make_module(str(uid)) for uid in hosted}
    needs = {name: ExpertNeed.of(module) for name, module in modules.items()}
    found = download_experts(node, hosted, lambda uid: needs[str(uid)], on_progress)
    for name, module in modules.items():
        module.load_state_dict(found[name].state)
    return modules


def _existing(node: Node, pattern: str) -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
    hosted = find_hosted(node, pattern)
    if not hosted:
        raise NotEnoughPeers(f"nobody hosts an expert that {pattern} stands for")
    return hosted


async def _class_of(node: Node, uid: ExpertUid, replicas: Sequence[ExpertReplica]) -> ModuleFactory:
    """Return the function that makes modules like that of an expert, as most of its servers describe it."""
    calls = node.service(ExpertCalls.from_node)

    async def describe(replica: ExpertReplica) -> Description | None:
        try:
            return (await calls.describe(replica, [uid], timeout_s=_DESCRIBE_S))[0]
        except (NetworkError, PeerError):
            return None

    answers = await run_together([describe(one) for one in replicas[:_DESCRIBED_BY]], _DESCRIBED_BY)
    described = [one for one in answers if one is not None]
    kinds = Counter((one.expert_class, one.schema.digest) for one in described)
    if not kinds:
        raise NotEnoughPeers(f"no server of {uid} says what it is")
    (name, digest), _ = kinds.most_common(1)[0]
    if not name:
        raise UsageError(
            f"{uid} is no expert of a class with a name: pass make_module, a function that takes the name of "
            "an expert and returns a new module like that of its server"
        )
    schema = next(one.schema for one in described if one.schema.digest == digest)
    first = schema.input_leaves[0]
    length = first.shape[0] if len(first.shape) > 1 else 1
    settings = ExpertSettings(hidden_dim=first.shape[-1] if first.shape else 1, sequence_length=length)
    factory = expert_class(name)
    with torch.device("meta"):  # its servers say how large it is, and memory is taken only below
        module, _ = make(name, factory, settings)
        size_bytes = sum(one.nbytes for one in module.state_dict().values())
    if size_bytes > BYTES_MAX:
        raise UsageError(
            f"the servers of {uid} say that it is a {name} of {size(size_bytes)}: "
            "pass make_module, if that is what you expect"
        )

    def make_module(_: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            module, _sample = make(name, factory, settings)
        return module.to(first.dtype) if first.is_floating else module

    return make_module
