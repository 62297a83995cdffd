"""The experts that exist: the names that a pattern stands for, looked up level by level in the directory. The
cost depends on the experts that are hosted, not on the size of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.names import COORDINATE_MAX, DEPTH_MAX, NAMES_MAX, ExpertGrid, ExpertUid

_PREFIXES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class ExpertPattern:
    """A pattern of names: for each dimension a range of coordinates. With `deeper` it stands for names with
    further coordinates instead, whatever these are.
    """

    block: str
    dimensions: tuple[range, ...]
    deeper: bool = False

    @classmethod
    def parse(cls, text: str) -> ExpertPattern:
        """Parse a pattern: what `ExpertGrid.parse` takes, where `*` stands for any coordinate. At the end it
        stands for any number of them: `ffn.*` means all experts of the grid ffn. Raises UsageError.
        """
        block, *parts = text.split(".")
        deeper = parts[-1:] == ["*"]
        if deeper:
            parts.pop()
        if not parts and deeper:
            return cls.below(ExpertUid.parse_prefix(block))
        anything = f"[0:{COORDINATE_MAX + 1}]"
        grid = ExpertGrid.parse(".".join((block, *(anything if part == "*" else part for part in parts))))
        return cls(grid.block, grid.dimensions, deeper)

    @classmethod
    def below(cls, prefix: ExpertUid) -> ExpertPattern:
        """Return the pattern that stands for all experts whose names begin with `prefix`."""
        return cls(prefix.block, tuple(range(one, one + 1) for one in prefix.coordinates), True)

    def has_prefix(self, prefix: ExpertUid) -> bool:
        """Return whether names of the pattern may begin with `prefix`."""
        depth = len(prefix.coordinates)
        return (
            prefix.block == self.block
            and (self.deeper or depth < len(self.dimensions))
            and all(
                coordinate in dimension
                for coordinate, dimension in zip(prefix.coordinates, self.dimensions, strict=False)
            )
        )

    def __contains__(self, uid: ExpertUid) -> bool:
        depth = len(uid.coordinates)
        return (
            self.has_prefix(uid.prefix)
            and (depth > len(self.dimensions) if self.deeper else depth == len(self.dimensions))
            and (depth > len(self.dimensions) or uid.coordinates[-1] in self.dimensions[depth - 1])
        )


async def hosted_experts(
    directory: Directory,
    patterns: Sequence[ExpertPattern],
    *,
    timeout_s: float,
    experts_max: int = NAMES_MAX,
) -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
    """Return the experts that servers declare and some pattern stands for, with their replicas, in the order
    of their names; the first ones found when they are more than `experts_max`. Each of the reads may take
    `timeout_s`. Raises NetworkError when no peer answers one of them.
    """
    level = sorted({ExpertUid(pattern.block, ()) for pattern in patterns})
    found: dict[ExpertUid, tuple[ExpertReplica, ...]] = {}
    for _ in range(DEPTH_MAX):
        below: list[ExpertUid] = []
        for start in range(0, len(level), _PREFIXES_AT_ONCE):
            branches = await directory.branches(level[start : start + _PREFIXES_AT_ONCE], timeout_s=timeout_s)
            for prefix, branch in branches.items():
                if len(prefix.coordinates) >= DEPTH_MAX:
                    continue
                experts = {prefix.child(place): replicas for place, replicas in branch.experts.items()}
                found |= {
                    uid: replicas
                    for uid, replicas in experts.items()
                    if any(uid in pattern for pattern in patterns)
                }
                deeper = [prefix.child(place) for place in sorted(branch.deeper)]
                below += [uid for uid in deeper if any(pattern.has_prefix(uid) for pattern in patterns)]
        level = below[: max(experts_max, _PREFIXES_AT_ONCE)]
        if not level or len(found) >= experts_max:
            break
    return dict(sorted(found.items())[:experts_max])
