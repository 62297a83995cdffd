"""Download a grid of experts: its parameters as a safetensors file, or its whole state as a folder of
checkpoints from which servers resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.optim.state.snapshot import flat_bytes, memory_of, pieces_digest
from moe.client.downloading import (
    ExpertNeed,
    Progress,
    download_experts,
    fetch_agreed,
    find_hosted,
    longest_s,
)
from moe.server.checkpoints import ExpertCheckpoints
from moe.server.replica_states import read_lineage
from swarm.core.errors import NotEnoughPeers, SwarmError, UsageError
from swarm.core.files import replace_durably

if TYPE_CHECKING:
    import torch

    from moe.protocol.declarations import ExpertReplica
    from moe.protocol.names import ExpertUid
    from moe.server.expert import Expert
    from swarm.node import Node
    from swarm.run.grid_experts import ExpertFactory
    from swarm.run.signed import SignedSpecification

# Replicas differ by their steps since the last average. If they differ by more than this fraction of the
# norm, one of them lies or resumed from an old checkpoint.
_APART_MAX = 0.25
_EXPERTS_LISTED = 8  # names listed in one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class GridExport:
    """The experts that were downloaded."""

    experts: list[str]
    missing: list[str]  # experts of the grid that nobody hosts
    doubtful: list[str]  # experts whose replicas differ too much
    digest: str  # digest of all parameters

    @property
    def warnings(self) -> list[str]:
        """Return warnings for the user, one sentence each."""
        found = []
        if self.missing:
            found.append(f"nobody hosts {_listed(self.missing)}")
        if self.doubtful:
            found.append(
                f"the replicas of {_listed(self.doubtful)} differ too much: one of their servers lies or "
                "has an old state. With three replicas the median is used"
            )
        return found


def export_grid(
    node: Node, signed: SignedSpecification, factory: ExpertFactory, path: Path, on_progress: Progress
) -> GridExport:
    """Write the parameters and buffers of all experts to a safetensors file, as NAME.TENSOR: ffn.0.1.0.weight
    is the tensor 0.weight of the expert ffn.0.1.

    Raises NotEnoughPeers when no server sends an expert that it declares, and SwarmError when the file cannot
    be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if path.is_dir():
        raise UsageError(f"{path} is a folder: --output names a file")
    hosted = _hosted(node, signed)
    template = factory.make(next(iter(hosted)))
    need = ExpertNeed.of(template.module)
    found = download_experts(node, hosted, lambda uid: need, on_progress)
    tensors = {
        f"{name}.{key}": tensor.clone() for name, one in found.items() for key, tensor in one.state.items()
    }
    digest = _digest_of(tensors)
    metadata = {
        "format": "pt",
        "grid": signed.full_name,
        "specification": json.dumps(signed.grid.table(), sort_keys=True),
        "versions": json.dumps({name: one.version for name, one in found.items()}),
        "digest": digest,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise SwarmError(f"{path} could not be written: {error}") from error
    return GridExport(
        experts=list(found),
        missing=_missing(signed, hosted),
        doubtful=[name for name, one in found.items() if one.apart > _APART_MAX],
        digest=digest,
    )


def checkpoint_grid(
    node: Node, signed: SignedSpecification, factory: ExpertFactory, folder: Path, on_progress: Progress
) -> GridExport:
    """Write a checkpoint of every expert, with the optimizer's statistics and its lineage, to a folder. On
    any machine, `swarm serve --checkpoint` resumes from it. Only one expert at a time is in memory.

    Raises as `export_grid` does.
    """
    hosted = _hosted(node, signed)
    doubtful: list[str] = []
    digests: list[bytes] = []
    for done, (uid, replicas) in enumerate(hosted.items(), 1):
        expert = factory.make(uid)
        need = ExpertNeed(expert.state_bytes_max)
        agreed = node.network.run(
            fetch_agreed(node, uid, replicas, need, parameters_only=False), longest_s([need])
        )
        with expert.lock:
            expert.load_state(agreed.blob, read_lineage(agreed.reply.version, agreed.reply.past))
        _save(expert, uid, folder)
        if agreed.apart > _APART_MAX:
            doubtful.append(str(uid))
        digests.append(_digest_of(expert.module.state_dict()).encode())
        on_progress(done, len(hosted), str(uid))
    return GridExport(
        experts=[str(uid) for uid in hosted],
        missing=_missing(signed, hosted),
        doubtful=doubtful,
        digest=pieces_digest(digests).hex(),
    )


def _save(expert: Expert, uid: ExpertUid, folder: Path) -> None:
    if not ExpertCheckpoints(folder, {uid: expert}).save():
        raise SwarmError(f"the checkpoint of {uid} could not be written to {folder}")


def _hosted(node: Node, signed: SignedSpecification) -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
    hosted = {uid: one for pattern in signed.grid.experts for uid, one in find_hosted(node, pattern).items()}
    if not hosted:
        raise NotEnoughPeers(f"nobody hosts an expert of {signed.full_name} now")
    return dict(sorted(hosted.items()))


def _missing(signed: SignedSpecification, hosted: Mapping[ExpertUid, object]) -> list[str]:
    names = (uid for pattern in signed.grid.patterns for uid in pattern.names())
    return [str(uid) for uid in names if uid not in hosted]


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and values. The tensors must be on the host."""
    pieces = (
        piece
        for name in sorted(tensors)
        for piece in (name.encode() + b"\0", memory_of(flat_bytes(tensors[name])) or b"")
    )
    return pieces_digest(pieces).hex()


def _listed(names: list[str]) -> str:
    more = len(names) - _EXPERTS_LISTED
    return ", ".join(names[:_EXPERTS_LISTED]) + (f" and {more} more" if more > 0 else "")
