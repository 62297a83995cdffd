"""Applied backward passes are remembered, within bounds."""

from __future__ import annotations

from moe.server.logic.applied import AppliedRequests


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_repeated_request_gets_its_answer_only_for_the_same_caller() -> None:
    applied: AppliedRequests[str] = AppliedRequests()
    applied.note("x", name(1), "gradients", 10)
    assert applied.is_known("x", name(1))
    assert applied.answer("x", name(1)) == "gradients"
    assert not applied.is_known("y", name(1))
    assert applied.answer("y", name(1)) is None


def test_answers_are_forgotten_before_ids() -> None:
    applied: AppliedRequests[str] = AppliedRequests(answers_bytes_max=25)
    for number in range(5):
        applied.note("x", name(number), str(number), 10)
    assert [applied.answer("x", name(number)) for number in range(5)] == [None, None, None, "3", "4"]
    assert all(applied.is_known("x", name(number)) for number in range(5))


def test_one_caller_cannot_evict_the_ids_of_others() -> None:
    applied: AppliedRequests[str] = AppliedRequests(ids_per_caller_max=10)
    applied.note("quiet", name(0), "kept", 1)
    for number in range(1000):
        applied.note("loud", name(number), "", 1)
    assert applied.answer("quiet", name(0)) == "kept"
    assert len(applied) == 11


def test_ids_and_answers_are_limited_over_all_callers() -> None:
    applied: AppliedRequests[str] = AppliedRequests(ids_max=20)
    for number in range(100):
        applied.note(f"caller {number}", name(number), "", 1)
    assert len(applied) == 20
    assert applied.is_known("caller 99", name(99))
    assert not applied.is_known("caller 0", name(0))
