"""Random numbers that are the same on every Python, whatever PYTHONHASHSEED says.

Of `random.Random` only `random()` and `getrandbits()` are promised to repeat from one Python to the next for
the same integer seed; how `choice`, `shuffle`, `sample` or `expovariate` use them has changed before and may
again. `Chance` defines those here, on `random()` alone, and takes its seed from text, through a hash that
does not change. It is a `random.Random`, so that services take it as their `rng`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Chance(random.Random):
    """A source of random numbers named by its parts: `Chance(seed, "faults")` has nothing in common with
    `Chance(seed, "work")`.
    """

    def __init__(self, *names: object) -> None:
        text = "/".join(str(name) for name in names)
        super().__init__(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))

    def below(self, count: int) -> int:
        """0 to count - 1, evenly (to within 2**-53)."""
        return int(self.random() * count)

    def happens(self, chance: float) -> bool:
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
        """Seconds until the next event of a kind of which `lambd` a second happen."""
        return -math.log(1.0 - self.random()) / lambd
