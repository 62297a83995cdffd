"""Which codec for what: by the role of the tensors, and by how many elements there are.

A policy, not a codec: it is asked once, when an averager is made, and what it answers is what peers compare
before they meet. All of them ask about the same tensors, so all get the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.compression.codec import Codec, find
from swarm.core.errors import UsageError

ADAPTIVE = "adaptive"  # what a user writes where a codec's name goes
ROLES = ("gradient", "pseudo_gradient", "parameter", "statistic", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """A codec's name for each role, and what small vectors travel in, which have next to nothing to gain from
    fewer bits.
    """

    gradient: str = "int8"
    pseudo_gradient: str = "int4"  # of many local steps; costs no loss (decision 14)
    parameter: str = "float16"
    statistic: str = "float32"  # second moments span more orders of magnitude than 16 bits hold
    activation: str = "int8"
    small: str = "float16"  # but where a role asks for more bits than this has
    small_elements_max: int = 1 << 14  # 32 KiB in float16: one message, whichever codec writes it

    def __post_init__(self) -> None:
        for name in (
            self.gradient,
            self.pseudo_gradient,
            self.parameter,
            self.statistic,
            self.activation,
            self.small,
        ):
            find(name)
        if self.small_elements_max < 0:
            raise UsageError(
                f"small_elements_max is a number of elements, 0 for none, not {self.small_elements_max}"
            )

    def choose(self, role: str, numel: int) -> Codec:
        """The codec for a vector of `numel` elements; UsageError for a role that is none of ROLES."""
        if role not in ROLES:
            raise UsageError(f"there is no role {role!r}; there is {', '.join(ROLES)}")
        codec, small = find(getattr(self, role)), find(self.small)
        return (
            small
            if numel <= self.small_elements_max and small.bits_per_element > codec.bits_per_element
            else codec
        )


def resolve(name: str, role: str, numel: int) -> Codec:
    """The codec that a user's choice means for such a vector: `ADAPTIVE`, or a codec's name. UsageError lists
    those there are.
    """
    return Adaptive().choose(role, numel) if name == ADAPTIVE else find(name)
