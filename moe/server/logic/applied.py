"""A bounded record of applied backward passes and their answers, so that each is applied only once.

A caller whose answer was lost repeats its request under the same id and gets the same answer. Answers are
forgotten before ids are: a repetition of a pass that was applied a long time ago, whose answer is gone, is
still not applied again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


IDS_MAX = 65536  # about 200 bytes each; callers repeat within seconds
ANSWERS_BYTES_MAX = 128 << 20  # the answers to the last seconds' passes; an older one is computed again
IDS_PER_CALLER_MAX = 8192  # so that one caller cannot evict the others' ids


class AppliedRequests(Generic[T]):
    """Applied passes by caller and request id. Not thread-safe."""

    def __init__(
        self,
        *,
        ids_max: int = IDS_MAX,
        answers_bytes_max: int = ANSWERS_BYTES_MAX,
        ids_per_caller_max: int = IDS_PER_CALLER_MAX,
    ) -> None:
        self._ids_max, self._ids_per_caller_max = ids_max, ids_per_caller_max
        self._answers_bytes_max = answers_bytes_max
        # the most recent caller comes last
        self._by_caller: OrderedDict[Hashable, OrderedDict[bytes, None]] = OrderedDict()
        self._answers: OrderedDict[tuple[Hashable, bytes], tuple[T, int]] = OrderedDict()
        self._ids = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._ids

    def is_known(self, caller: Hashable, request_id: bytes) -> bool:
        """Return whether the pass was applied."""
        return request_id in self._by_caller.get(caller, ())

    def answer(self, caller: Hashable, request_id: bytes) -> T | None:
        """Return the answer of an applied pass; None when it is forgotten."""
        found = self._answers.get((caller, request_id))
        return found[0] if found is not None else None

    def note(self, caller: Hashable, request_id: bytes, answer: T, size_bytes: int) -> None:
        """Record an applied pass."""
        ids = self._by_caller.setdefault(caller, OrderedDict())
        self._by_caller.move_to_end(caller)
        if request_id in ids:
            return
        ids[request_id] = None
        self._ids += 1
        self._answers[caller, request_id] = (answer, size_bytes)
        self._bytes += size_bytes
        if len(ids) > self._ids_per_caller_max:
            self._forget(caller)
        while self._ids > self._ids_max:
            self._forget(next(iter(self._by_caller)))
        while self._bytes > self._answers_bytes_max and self._answers:
            _, (_, freed_bytes) = self._answers.popitem(last=False)
            self._bytes -= freed_bytes

    def _forget(self, caller: Hashable) -> None:
        """Forget a caller's oldest pass."""
        ids = self._by_caller[caller]
        request_id, _ = ids.popitem(last=False)
        self._ids -= 1
        dropped = self._answers.pop((caller, request_id), None)
        if dropped is not None:
            self._bytes -= dropped[1]
        if not ids:
            del self._by_caller[caller]
