"""A bounded record of applied backward passes and their answers, so that each is applied only once.

A caller whose answer was lost repeats its request under the same id and gets the same answer. Answers are
forgotten before ids are: a repetition of a pass that was applied a long time ago, whose answer is gone, is
still not applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from moe.server.logic.caller_cache import CacheLimits, CallerCache

T = TypeVar("T")

# about 500 bytes each; callers repeat within seconds. Of one caller at most an eighth
IDS = CacheLimits(
    bytes_max=65536, bytes_per_caller_max=8192, strangers_bytes_max=32768, entry_overhead_bytes=0
)
# the answers to the last seconds' passes; a caller that repeats an older one learns that it was applied
ANSWERS = CacheLimits(bytes_max=128 << 20, bytes_per_caller_max=128 << 20, strangers_bytes_max=8 << 20)


class AppliedRequests(Generic[T]):
    """Applied passes by caller and request id. Not thread-safe."""

    def __init__(
        self,
        is_stranger: Callable[[Hashable], bool],
        *,
        ids: CacheLimits = IDS,
        answers: CacheLimits = ANSWERS,
    ) -> None:
        """`ids` counts each id as one byte."""
        self._ids: CallerCache[None] = CallerCache(ids, is_stranger)
        self._answers: CallerCache[T] = CallerCache(answers, is_stranger)

    def __len__(self) -> int:
        return len(self._ids)

    def is_known(self, caller: Hashable, request_id: bytes) -> bool:
        """Return whether the pass was applied."""
        return self._ids.has(caller, request_id)

    def answer(self, caller: Hashable, request_id: bytes) -> T | None:
        """Return the answer of an applied pass; None when it is forgotten."""
        return self._answers.get(caller, request_id)

    def note(self, caller: Hashable, request_id: bytes, answer: T, size_bytes: int) -> None:
        """Record an applied pass."""
        if not self.is_known(caller, request_id):
            self._ids.put(caller, request_id, None, 1)
            self._answers.put(caller, request_id, answer, size_bytes)
