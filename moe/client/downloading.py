"""Download experts: their parameters, or all that training needs, from the servers that host them.

No server is trusted. If an expert has three replicas or more, three are asked and the median of each element
is used, so that one liar or one broken server changes little. With two replicas it is unknown which one lies:
the result says how far they are apart.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from averaging.optim.state.snapshot import Blob, encode_snapshot, is_finite, read_header, read_tensors
from moe.client.logic.agreement import distance, largest_agreeing, median_of
from moe.client.replicas.together import run_together
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.names import ExpertUid
from moe.protocol.states import BUSY_S_MAX, StateFetching, transfer_s_max
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node
    from swarm.wire.expert_pb2 import ExpertStateReply

_log = logging.getLogger(__name__)

EXPERTS_MAX = 65536
BYTES_MAX = 1 << 30  # size of one expert whose size is not known
_COMPARED = 3  # replicas of one expert
_ASKED_MAX = 8  # replicas of one expert, until three have given a state
_AT_ONCE = 4  # experts; each is in memory three times for a moment
_READ_TIMEOUT_S = 10.0
_MARGIN_S = 10.0  # for a busy network thread
_HEADER_BYTES = 4096  # header of a tensor in a state

Progress: TypeAlias = Callable[[int, int, str], object]
# the size of the state that an expert can have, and what raises PeerError unless it is one
Check: TypeAlias = Callable[[Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True, slots=True, eq=False)
class DownloadedExpert:
    """An expert as its servers sent it."""

    name: str
    state: dict[str, torch.Tensor]  # the module's state_dict
    version: int  # as the servers say
    compared: int  # replicas that were compared
    # the largest distance of one of them from `state`, relative to its norm. Replicas differ by what each
    # has learned since their last average.
    apart: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertNeed:
    """The size and the tensors that an expert's state can have, as far as they are known beforehand."""

    bytes_max: int = BYTES_MAX
    check: Check = lambda tensors: None

    @classmethod
    def of(cls, module: torch.nn.Module) -> ExpertNeed:
        """Return the need of a module: names, shapes and dtypes of its own `state_dict`."""
        own = {name: one for name, one in module.state_dict().items() if isinstance(one, torch.Tensor)}

        def check(tensors: Mapping[str, torch.Tensor]) -> None:
            if tensors.keys() != own.keys():
                odd = min(tensors.keys() ^ own.keys())
                raise PeerError(f"its module is another one: only one of the two has {odd[:60]!r}")
            for name, one in own.items():
                if tensors[name].shape != one.shape or tensors[name].dtype != one.dtype:
                    raise PeerError(f"its module is another one: they differ in {name!r}")

        return cls(sum(one.nbytes + _HEADER_BYTES for one in own.values()) + _HEADER_BYTES, check)


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    peer_id: PeerId
    reply: ExpertStateReply
    header: dict[str, object]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class AgreedState:
    """The state on which the replicas of an expert agree."""

    reply: ExpertStateReply  # from the server whose version is the median
    header: dict[str, object]  # likewise
    tensors: dict[str, torch.Tensor]
    compared: int
    apart: float

    @property
    def blob(self) -> Blob:
        """Return it as a state."""
        epoch = self.header["epoch"]
        assert isinstance(epoch, int)  # checked when it was read
        return encode_snapshot(epoch, self.header, list(self.tensors.items()))


def find_hosted(node: Node, pattern: str) -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
    """Return the experts that match a pattern ("ffn.*") and that servers declare, with their replicas. Raises
    UsageError for a wrong pattern, and NetworkError when the DHT cannot be read.
    """
    patterns = [ExpertPattern.parse(pattern)]

    async def find() -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
        directory = Directory(node.dht.service)
        return await hosted_experts(directory, patterns, timeout_s=_READ_TIMEOUT_S, experts_max=EXPERTS_MAX)

    return node.network.run(find(), 8 * _READ_TIMEOUT_S + _MARGIN_S)


def download_experts(
    node: Node,
    hosted: Mapping[ExpertUid, Sequence[ExpertReplica]],
    need: Callable[[ExpertUid], ExpertNeed] = lambda uid: ExpertNeed(),
    on_progress: Progress = lambda done, total, name: None,
) -> dict[str, DownloadedExpert]:
    """Return the parameters and buffers of experts, by name. `on_progress` is called after each with how many
    are there, how many there will be, and its name.

    Raises NotEnoughPeers when no server gives a good state of one of them.
    """
    if not hosted:
        return {}
    needs = {uid: need(uid) for uid in hosted}

    async def download() -> dict[str, DownloadedExpert]:
        found: dict[str, DownloadedExpert] = {}

        async def one(uid: ExpertUid) -> None:
            agreed = await fetch_agreed(node, uid, hosted[uid], needs[uid], parameters_only=True)
            name = str(uid)
            found[name] = DownloadedExpert(
                name, agreed.tensors, agreed.reply.version, agreed.compared, agreed.apart
            )
            on_progress(len(found), len(hosted), name)

        await run_together([one(uid) for uid in hosted], _AT_ONCE)
        return {str(uid): found[str(uid)] for uid in hosted}

    return node.network.run(download(), longest_s(list(needs.values())))


def longest_s(needs: Sequence[ExpertNeed]) -> float:
    """Return the longest time that downloads of these experts may take, when all servers send at the slowest
    permitted pace.
    """
    return _MARGIN_S + _ASKED_MAX * sum(BUSY_S_MAX + transfer_s_max(one.bytes_max) for one in needs)


async def fetch_agreed(
    node: Node,
    uid: ExpertUid,
    replicas: Sequence[ExpertReplica],
    need: ExpertNeed,
    *,
    parameters_only: bool,
) -> AgreedState:
    """Return the state of an expert, from three replicas if there are as many, otherwise from fewer. Runs on
    the network loop. Raises NotEnoughPeers when no server sends a valid one.
    """
    asked = random.sample(list(replicas), min(len(replicas), _ASKED_MAX))
    given: list[_Given] = []
    reasons: list[str] = []
    while asked and len(given) < _COMPARED:
        part = [asked.pop() for _ in range(min(_COMPARED - len(given), len(asked)))]
        for one in await run_together(
            [_fetch(node, uid, replica, need, parameters_only=parameters_only) for replica in part],
            _COMPARED,
        ):
            if isinstance(one, _Given):
                given.append(one)
            else:
                reasons.append(one)
                _log.info("%s", one)
    if not given:
        raise NotEnoughPeers(
            f"no server gives the state of {uid}: {'; '.join(reasons[:3]) or 'none hosts it'}"
        )
    return await asyncio.get_running_loop().run_in_executor(node.network.pool, _agree, given)


def _agree(given: Sequence[_Given]) -> AgreedState:
    same = [given[place] for place in largest_agreeing([one.tensors for one in given])]
    middle = sorted(same, key=lambda one: one.reply.version)[len(same) // 2]
    states = [middle.tensors, *(one.tensors for one in same if one is not middle)]
    tensors = median_of(states)
    apart = max((distance(one.tensors, tensors) for one in same), default=0.0)
    return AgreedState(middle.reply, middle.header, tensors, len(same), apart)


async def _fetch(
    node: Node, uid: ExpertUid, replica: ExpertReplica, need: ExpertNeed, *, parameters_only: bool
) -> _Given | str:
    """Return the checked state that a server sends, or the reason why there is none."""
    loop = asyncio.get_running_loop()
    try:
        reply, blob = await node.service(StateFetching.from_node).fetch(
            replica, uid, need.bytes_max, parameters_only=parameters_only
        )
        header, tensors = await loop.run_in_executor(node.network.pool, _read, blob, need.check)
    except (PeerError, NetworkError, UsageError) as error:
        return f"peer {replica.peer_id} gave no state of {uid}: {error}"
    except TimeoutError:
        return f"peer {replica.peer_id} gave the state of {uid} too slowly"
    return _Given(replica.peer_id, reply, header, tensors)


def _read(blob: Blob, check: Check) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    header, start = read_header(blob)
    tensors = read_tensors(blob, header, start)
    for name, one in tensors.items():
        if not is_finite(one):
            raise PeerError(f"{name[:60]!r} contains NaN or infinity")
    check(tensors)
    return header, tensors
