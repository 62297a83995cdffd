"""Applied backward passes are remembered, within bounds."""

from __future__ import annotations

from collections.abc import Hashable

from moe.server.logic.applied import AppliedRequests
from moe.server.logic.caller_cache import CacheLimits


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def limits(bytes_max: int, per_caller: int = 1 << 30) -> CacheLimits:
    return CacheLimits(
        bytes_max=bytes_max,
        bytes_per_caller_max=per_caller,
        strangers_bytes_max=bytes_max // 2,
        entry_overhead_bytes=0,
    )


def is_stranger(caller: Hashable) -> bool:
    return str(caller).startswith("stranger")


def test_a_repeated_request_gets_its_answer_only_for_the_same_caller() -> None:
    applied: AppliedRequests[str] = AppliedRequests(is_stranger)
    applied.note("x", name(1), "gradients", 10)
    assert applied.is_known("x", name(1))
    assert applied.answer("x", name(1)) == "gradients"
    assert not applied.is_known("y", name(1))
    assert applied.answer("y", name(1)) is None


def test_answers_are_forgotten_before_ids() -> None:
    applied: AppliedRequests[str] = AppliedRequests(is_stranger, answers=limits(25))
    for number in range(5):
        applied.note("x", name(number), str(number), 10)
    assert [applied.answer("x", name(number)) for number in range(5)] == [None, None, None, "3", "4"]
    assert all(applied.is_known("x", name(number)) for number in range(5))


def test_one_caller_cannot_evict_the_ids_of_others() -> None:
    applied: AppliedRequests[str] = AppliedRequests(is_stranger, ids=limits(1000, 10))
    applied.note("quiet", name(0), "kept", 1)
    for number in range(1000):
        applied.note("loud", name(number), "", 1)
    assert applied.answer("quiet", name(0)) == "kept"
    assert len(applied) == 11


def test_ids_and_answers_are_limited_over_all_callers() -> None:
    applied: AppliedRequests[str] = AppliedRequests(is_stranger, ids=limits(20))
    for number in range(100):
        applied.note(f"caller {number}", name(number), "", 1)
    assert len(applied) == 20
    assert applied.is_known("caller 99", name(99))
    assert not applied.is_known("caller 0", name(0))


def test_strangers_of_any_number_displace_no_id_and_no_answer_of_a_member() -> None:
    """Before, strangers with a few hundred passes each made the server forget what members had asked."""
    applied: AppliedRequests[str] = AppliedRequests(is_stranger, ids=limits(20), answers=limits(200))
    for number in range(10):
        applied.note("member", name(number), f"answer {number}", 10)
    for number in range(1000):
        applied.note(f"stranger {number}", name(number), "", 10)
    assert len(applied) == 20
    assert [applied.answer("member", name(number)) for number in range(10)] == [
        f"answer {number}" for number in range(10)
    ]
    for number in range(10, 20):
        applied.note("member", name(number), f"answer {number}", 10)
    assert all(applied.is_known("member", name(number)) for number in range(20))
    assert not applied.is_known("stranger 999", name(999)), "members displace strangers"
