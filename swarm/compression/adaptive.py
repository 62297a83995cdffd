"""The choice of a codec by the role of the tensors and the number of elements.

This is a policy, not a codec: it is applied once, when an averager is made, and peers compare its result
before they meet. All peers apply it to the same tensors, so all get the same codec.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm.compression.codec import Codec, find
from swarm.core.errors import UsageError

ADAPTIVE = "adaptive"  # accepted wherever a codec's name is
Role: TypeAlias = Literal["gradient", "pseudo_gradient", "parameter", "statistic", "activation"]
ROLES: tuple[Role, ...] = typing.get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """The name of the codec for each role, and for small vectors, which gain almost nothing from
    fewer bits.
    """

    gradient: str = "int8"
    pseudo_gradient: str = "int4"  # the sum of many local steps; costs no loss (decision 14)
    parameter: str = "float16"
    statistic: str = "float32"  # second moments span more orders of magnitude than 16 bits hold
    activation: str = "int8"
    small: str = "float16"  # unless the role's codec has more bits
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

    def choose(self, role: Role, numel: int) -> Codec:
        """Return the codec for a vector of `numel` elements. Raises UsageError for a role that is not in
        ROLES.
        """
        if role not in ROLES:
            raise UsageError(f"there is no role {role!r}; there is {', '.join(ROLES)}")
        codec, small = find(getattr(self, role)), find(self.small)
        return (
            small
            if numel <= self.small_elements_max and small.bits_per_element > codec.bits_per_element
            else codec
        )


def resolve(name: str, role: Role, numel: int) -> Codec:
    """Return the codec that a user's choice (`ADAPTIVE`, or a codec's name) means for such a vector. Raises
    UsageError that lists the codecs for an unknown name.
    """
    return Adaptive().choose(role, numel) if name == ADAPTIVE else find(name)
