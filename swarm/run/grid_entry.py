"""Let a server enter a grid of experts: it creates the grid, or takes the specification from the swarm. The
user's options must not contradict that specification.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from moe.protocol.declarations import Directory
from moe.protocol.finding import ExpertPattern, hosted_experts
from swarm.core.clock import Clock
from swarm.core.errors import UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity
from swarm.core.ids import Contact
from swarm.run.creation import create_run
from swarm.run.signed import run_id_of

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService
    from swarm.net.membership import RunMembership
    from swarm.run.directory import RunDirectory
    from swarm.run.grid import GridSpecification
    from swarm.run.signed import SignedSpecification

_READ_TIMEOUT_S = 5.0
_MODULE_BYTES_MAX = 16 << 20


async def create_or_enter(
    directory: RunDirectory,
    offered: GridSpecification,
    given: Collection[str],
    owner: Identity,
    clock: Clock,
    *,
    membership: RunMembership | None = None,
) -> tuple[SignedSpecification, bool]:
    """Return the swarm's grid with the name of the offered one, and whether it is new. If there is none,
    `owner` creates it. If `owner` owns the grid and the offered specification differs, this becomes the next
    version. `given` holds the keys that the user has set. `membership`: that of the server, if it is invited.

    Raises UsageError if the swarm has several grids of the name, or one that differs in a key of `given`, and
    before anything is published if the server is invited to another grid than the one that it would create.
    """
    listed = [one for one in await directory.listings() if one.name == offered.name]
    own = run_id_of(owner.peer_id, offered.name, offered.recovery_peer)
    if not listed or any(one.run_id == own for one in listed):
        if offered.members == "invited" and membership is not None and membership.run_id != own:
            raise UsageError(
                f"this invite is to {membership.invite.name}@{membership.run_id}, and the swarm has no "
                f"{offered.name}: leave --experts out to host experts of the grid to which you are invited, "
                "or create a grid of your own without the invite"
            )
        return await create_run(directory, offered, owner, clock)
    if len(listed) > 1:
        names = ", ".join(one.full_name for one in listed[:8])
        raise UsageError(f"{len(listed)} grids have this name: {names}. Choose one with --grid NAME@ID")
    signed = await directory.specification(listed[0].run_id)
    check_agrees(signed, offered, given)
    return signed, False


def check_agrees(signed: SignedSpecification, offered: GridSpecification, given: Collection[str]) -> None:
    """Raise UsageError if the signed grid differs from the offered one in keys of `given`. The offered
    experts may be a subset of the grid's.
    """
    existing = signed.grid
    before, after = existing.flat_table(), offered.flat_table()
    problems = [
        f"its {key} is {before[key]!r}, not {after[key]!r}"
        for key in sorted(set(given) - {"experts"})
        if before[key] != after[key]
    ]
    if "experts" in given:
        problems += [
            f"it has no experts {one}: its experts are {', '.join(existing.experts)}"
            for one in offered.patterns
            if not existing.has(one)
        ]
    if problems:
        raise UsageError(
            f"the swarm has the grid {signed.full_name}, and {'; '.join(problems)}. Leave these options out, "
            "or create another grid with other names for its experts"
        )


async def read_servers(dht: DhtService, grid: GridSpecification) -> list[Contact]:
    """Return the servers that declare experts of a grid. Raises NetworkError when nobody answers."""
    patterns = [ExpertPattern(one.block, one.dimensions) for one in grid.patterns]
    hosted = await hosted_experts(Directory(dht), patterns, timeout_s=_READ_TIMEOUT_S)
    return list({one.peer_id: one.contact for replicas in hosted.values() for one in replicas}.values())


def module_hash(file: Path) -> str:
    """Return the SHA-256 of a user's own file of expert classes. Raise UsageError if it cannot be read."""
    try:
        with user_path(file).open("rb") as stream:
            content = stream.read(_MODULE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise UsageError(f"--module {file}: there is no such Python file") from None
    except OSError as error:
        raise UsageError(f"--module {file}: {error.strerror or error}") from error
    if len(content) > _MODULE_BYTES_MAX:
        raise UsageError(f"--module {file} is larger than {_MODULE_BYTES_MAX >> 20} MiB")
    return hashlib.sha256(content).hexdigest()


def check_module(signed: SignedSpecification, file: Path | None) -> None:
    """Raise UsageError unless the file of expert classes is the one of the grid."""
    wanted = signed.grid.module
    if wanted is None and file is None:
        return
    if wanted is None:
        raise UsageError(f"the experts of {signed.full_name} need no file of your own: leave --module out")
    if file is None:
        raise UsageError(
            f"the expert class {signed.grid.expert_class!r} of {signed.full_name} is in a file of its owner "
            f"(SHA-256 {wanted}): get it from the owner, read it, and pass it with --module FILE.py"
        )
    if module_hash(file) != wanted:
        raise UsageError(
            f"--module {file} is not the file of {signed.full_name} (SHA-256 {wanted}): get that "
            "one from the owner"
        )
