"""Batching: limits, order and fairness, checked against their definitions on random traffic."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.server.logic.batching import Batcher, BatchLimits, QueuedRequest
from swarm.core.errors import UsageError


def request(
    number: int, *, queue: str = "a", caller: str = "x", samples: int = 1, size_bytes: int = 10
) -> QueuedRequest:
    return QueuedRequest(number, queue, caller, samples, size_bytes, float(samples))


def numbers(batch: list[QueuedRequest]) -> list[int]:
    return [one.number for one in batch]


def test_an_idle_device_starts_at_once() -> None:
    batcher = Batcher()
    assert batcher.take(0.0) == []
    assert batcher.due_s() is None
    assert batcher.offer(request(1), 5.0) == ""
    assert batcher.due_s() == 5.0
    assert numbers(batcher.take(5.0)) == [1]


def test_strangers_together_get_half_of_the_queue_and_members_the_rest() -> None:
    """Before, strangers with eight requests each of 128 identities left no place to members."""
    limits = BatchLimits(queued_requests_max=8, queued_bytes_max=1000)

    def offer(number: int, size_bytes: int, *, is_stranger: bool) -> str:
        one = request(number, caller=f"caller {number}", size_bytes=size_bytes)
        return batcher.offer(replace(one, is_stranger=is_stranger), 0.0)

    batcher = Batcher(limits)
    answers = [offer(number, 10, is_stranger=True) for number in range(6)]
    assert answers[:4] == [""] * 4
    assert answers[4:] == ["strangers have their half of the queue: 40 bytes in 4 of 4 queued"] * 2
    assert [offer(number, 10, is_stranger=False) for number in range(10, 14)] == [""] * 4
    batcher = Batcher(limits)
    assert [bool(offer(number, 300, is_stranger=True)) for number in range(2)] == [False, True]
    assert not offer(2, 600, is_stranger=False)
    assert len(batcher.take(0.0)) == 2
    assert not offer(3, 900, is_stranger=True), "one request may be larger than half"


def test_the_size_that_fitted_into_memory_limits_later_batches_of_its_queue_and_grows_slowly() -> None:
    batcher = Batcher(BatchLimits(batch_samples_max=64, batch_samples_min=64, linger_s=100.0))
    batcher.ran_out_of_memory("a", 10)
    for number in range(16):
        batcher.offer(request(number, queue="a", samples=4), 0.0)
        batcher.offer(request(100 + number, queue="b", samples=4), 0.0)
    assert numbers(batcher.take(0.0)) == [0, 1]  # a batch does not wait for more samples than it may have
    assert len(batcher.take(0.0)) == 16
    assert numbers(batcher.take(0.0)) == [2, 3]
    assert numbers(batcher.take(0.0)) == [4, 5]
    sizes = []
    while batcher.samples_max("a") < 64:
        batcher.succeeded("a")
        sizes.append(batcher.samples_max("a"))
    assert sizes == sorted(sizes)
    assert 100 < len(sizes) < 150
    assert max(later - earlier for earlier, later in itertools.pairwise(sizes)) <= 2
    batcher.ran_out_of_memory("a", 1000)
    assert batcher.samples_max("a") == 64


def test_a_request_above_the_memory_limit_is_a_batch_of_its_own() -> None:
    batcher = Batcher(BatchLimits(batch_samples_max=64))
    batcher.ran_out_of_memory("a", 2)
    for number in range(2):
        batcher.offer(request(number, samples=40), 0.0)
    assert [numbers(batcher.take(0.0)) for _ in range(3)] == [[0], [1], []]


def test_requests_that_wait_become_one_batch_per_expert() -> None:
    batcher = Batcher(BatchLimits(batch_samples_max=10))
    for number, (queue, samples) in enumerate([("a", 4), ("b", 1), ("a", 6), ("a", 1)]):
        assert not batcher.offer(request(number, queue=queue, samples=samples), float(number))
    assert numbers(batcher.take(9.0)) == [0, 2]
    assert numbers(batcher.take(9.0)) == [1]
    assert numbers(batcher.take(9.0)) == [3]


def test_a_small_batch_waits_at_most_linger_s() -> None:
    batcher = Batcher(BatchLimits(batch_samples_min=4, linger_s=0.5))
    batcher.offer(request(1, samples=2), 10.0)
    assert batcher.take(10.4) == []
    assert batcher.due_s() == 10.5
    batcher.offer(request(2, samples=2), 10.4)
    assert batcher.due_s() == 10.0  # there are enough samples: the batch is overdue
    assert numbers(batcher.take(10.4)) == [1, 2]
    batcher.offer(request(3), 11.0)
    assert numbers(batcher.take(11.5)) == [3]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BatchLimits(queued_requests_max=2), "2 queued"),
        (BatchLimits(queued_bytes_max=20), "2 queued"),
        (BatchLimits(queued_requests_per_caller_max=2), "2 requests of yours"),
    ],
)
def test_a_full_queue_refuses_with_a_reason(config: BatchLimits, said: str) -> None:
    batcher = Batcher(config)
    assert not batcher.offer(request(1), 0.0)
    assert not batcher.offer(request(2), 0.0)
    assert said in batcher.offer(request(3), 0.0)
    assert (batcher.queued, batcher.queued_bytes) == (2, 20)
    assert numbers(batcher.take(0.0)) == [1, 2]
    assert not batcher.offer(request(3), 0.0)


def test_a_request_above_the_byte_limit_is_queued_when_the_queue_is_empty() -> None:
    batcher = Batcher(BatchLimits(queued_bytes_max=5))
    assert not batcher.offer(request(1, size_bytes=10), 0.0)


def test_a_withdrawn_request_is_not_computed() -> None:
    batcher = Batcher()
    batcher.offer(request(1), 0.0)
    batcher.offer(request(2), 0.0)
    assert batcher.withdraw(1)
    assert not batcher.withdraw(1)
    assert numbers(batcher.take(0.0)) == [2]
    assert not batcher.withdraw(2)
    assert (batcher.queued, batcher.queued_bytes, batcher.queued_cost) == (0, 0, 0.0)


def test_a_caller_with_many_requests_does_not_delay_one_with_few() -> None:
    batcher = Batcher(BatchLimits(batch_samples_max=8))
    for number in range(40):
        batcher.offer(request(number, caller="greedy", samples=8), 0.0)
    batcher.take(0.0)
    batcher.offer(request(100, caller="modest", samples=8), 1.0)
    assert 100 in numbers(batcher.take(1.0)) + numbers(batcher.take(1.0))


def test_impossible_limits_are_refused() -> None:
    for wrong in (
        {"batch_samples_max": 0},
        {"linger_s": -1.0},
        {"batch_samples_min": 9, "batch_samples_max": 8},
    ):
        with pytest.raises(UsageError):
            BatchLimits(**wrong)  # type: ignore[arg-type]


def test_a_caller_alone_is_served_oldest_first_over_all_experts() -> None:
    rng = random.Random(3)
    batcher = Batcher(BatchLimits(batch_requests_max=1))
    for number in range(100):
        batcher.offer(request(number, queue=rng.choice("abc"), samples=rng.randint(1, 9)), float(number))
    assert [numbers(batcher.take(200.0)) for _ in range(100)] == [[number] for number in range(100)]


@pytest.mark.parametrize("seed", range(20))
def test_callers_that_always_wait_get_equal_shares(seed: int) -> None:
    """Shares are equal whatever the number and size of the requests that each caller keeps waiting."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 16) for name in "pqrs"}
    # queued requests of each caller: more than one batch takes, since otherwise a caller asks for less than
    # its share
    callers = {name: 128 // size + rng.randint(1, 60) for name, size in sizes.items()}
    batcher = Batcher(BatchLimits(batch_samples_max=32, queued_requests_per_caller_max=1000))
    served = dict.fromkeys(callers, 0)
    number = 0
    waiting = dict.fromkeys(callers, 0)
    for step in range(2000):
        for name, many in callers.items():
            while waiting[name] < many:
                number += 1
                assert not batcher.offer(
                    request(number, queue=rng.choice("ab"), caller=name, samples=sizes[name]), float(step)
                )
                waiting[name] += 1
        for one in batcher.take(float(step)):
            served[str(one.caller)] += one.samples
            waiting[str(one.caller)] -= 1
    # how far a caller may be ahead: its part of a batch beyond its turn, and one request
    slack = 32 + 16 + max(callers[name] * sizes[name] for name in callers)
    assert max(served.values()) - min(served.values()) <= slack, served
    assert min(served.values()) > 10_000


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "take", "withdraw"]), st.integers(0, 7), st.integers(1, 16)),
        max_size=120,
    )
)
def test_requests_are_served_once_and_within_limits_under_random_traffic(
    steps: list[tuple[str, int, int]],
) -> None:
    config = BatchLimits(
        batch_samples_max=16, batch_requests_max=3, queued_requests_max=12, queued_requests_per_caller_max=5
    )
    batcher = Batcher(config)
    waiting: dict[int, QueuedRequest] = {}
    for number, (what, pick, samples) in enumerate(steps):
        if what == "offer":
            one = request(number, queue="ab"[pick % 2], caller="xyz"[pick % 3], samples=samples)
            full = len(waiting) >= 12 or sum(other.caller == one.caller for other in waiting.values()) >= 5
            assert bool(batcher.offer(one, float(number))) == full
            if not full:
                waiting[number] = one
        elif what == "withdraw" and waiting:
            chosen = sorted(waiting)[pick % len(waiting)]
            assert batcher.withdraw(chosen)
            del waiting[chosen]
        elif what == "take":
            batch = batcher.take(float(number))
            assert bool(batch) == bool(waiting)
            assert len({one.queue for one in batch}) <= 1
            assert len(batch) <= 3
            assert sum(one.samples for one in batch) <= 16
            for one in batch:
                assert waiting.pop(one.number) is one
        assert batcher.queued == len(waiting)
        assert batcher.queued_cost == pytest.approx(sum(one.cost for one in waiting.values()))


@pytest.mark.parametrize("queue", ["first", "second"])
def test_withdrawn_requests_leave_no_trace_behind_one_that_waits(queue: str) -> None:
    """The order of a queue, and that of all, are heaps, from which removed entries go late: their sizes stay
    bounded (without that, 2.4 MB here), and the order right.
    """
    batcher = Batcher(BatchLimits(linger_s=10.0, batch_samples_min=4))
    number = 0
    assert not batcher.offer(QueuedRequest(0, "first", "a", 1, 8, 1.0), 0.0)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            number += 1
            assert not batcher.offer(QueuedRequest(number, queue, "a", 1, 8, 1.0), 0.0)
            assert batcher.withdraw(number)
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()
    assert not batcher.offer(QueuedRequest(number + 1, "third", "b", 4, 8, 4.0), 0.0)
    assert [one.number for one in batcher.take(1.0)] == [number + 1], "it need not wait for others"
    assert batcher.take(1.0) == []
    assert [one.number for one in batcher.take(10.0)] == [0]
    assert batcher.queued == 0
