"""Random numbers that are the same on every Python version and for every PYTHONHASHSEED.

Of `random.Random` only `random()` and `getrandbits()` are guaranteed to repeat between versions for the same
integer seed; the way in which `choice`, `shuffle`, `sample` and `expovariate` use them has changed before.
`Chance` defines these on `random()` alone, and takes its seed from text, through a stable hash. It is a
`random.Random`, so that services accept it as their `rng`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Chance(random.Random):
    """Source of random numbers, seeded by its arguments: `Chance(seed, "faults")` is independent of
    `Chance(seed, "work")`.
    """

    def __init__(self, *names: object) -> None:
        text = "/".join(str(name) for name in names)
        super().__init__(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))

    def below(self, count: int) -> int:
        """Return a uniform integer from 0 to count - 1 (to within 2**-53)."""
        return int(self.random() * count)

    def happens(self, chance: float) -> bool:
        """Return True with this probability."""
        return self.random() < chance

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self.random()

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        numbers = range(start) if stop is None else range(start, stop, step)
        return numbers[self.below(len(numbers))]

    def randint(self, a: int, b: int) -> int:
        return a + self.below(b - a + 1)

    def choice(self, seq: Any) -> Any:
        if not len(seq):
            raise IndexError("cannot choose from an empty sequence")
        return seq[self.below(len(seq))]

    def choices(
        self, population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1
    ) -> list[Any]:
        if weights is not None or cum_weights is not None:
            raise NotImplementedError("weighted choices are not pinned across Python versions")
        return [self.choice(population) for _ in range(k)]

    def shuffle(self, x: MutableSequence[Any]) -> None:
        for last in range(len(x) - 1, 0, -1):
            other = self.below(last + 1)
            x[last], x[other] = x[other], x[last]

    def sample(self, population: Sequence[T], k: int, *, counts: Any = None) -> list[T]:
        if counts is not None or not 0 <= k <= len(population):
            raise ValueError(f"cannot draw {k} of {len(population)}")
        drawn = list(population)
        for place in range(k):
            other = place + self.below(len(drawn) - place)
            drawn[place], drawn[other] = drawn[other], drawn[place]
        return drawn[:k]

    def expovariate(self, lambd: float = 1.0) -> float:
        """Return the time until the next event of a Poisson process with `lambd` events a second."""
        return -math.log(1.0 - self.random()) / lambd
