"""Batching: it decides which requests a device computes next, and which of them together. Pure logic between
the callers of a server and its device.

Requests of one expert and direction form a queue. A batch is taken from one queue, up to a number of samples,
which is smaller where larger batches have turned out not to be quicker (`BatchRates`).
The order between queues and within them is that of start-time fair queueing (Goyal, Vin and Cheng, 1996):
each request gets a virtual start, which is the virtual time or the end of its caller's previous request,
whichever is later. A caller alone is served oldest first; several callers get equal shares of samples,
whatever the number of requests that each has waiting; and no request waits forever. A full queue refuses at
once; strangers together may fill half of it.

Times are parameters. Not thread-safe: threads that share it hold a lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from swarm.core.errors import UsageError

# a limit set by memory grows by 1/64 with each successful batch: it doubles in 45 batches
_RECOVERY = 64
# Queues whose batches' times are remembered: 2 × EXPERTS_MAX, for both directions of every expert of a
# server. The least recently used one is forgotten.
_RATES_MAX = 8192
_REMOVED_MAX = 1024  # entries of removed requests in the heap of a queue, and in that of all queues
_IDLE_CALLERS_MAX = 1024  # without waiting requests whose virtual ends are remembered
# of the samples per second of the best class. Larger: more delay for little throughput
_RATE_SHARE_MIN = 0.8
# time that a batch may always take: joining requests for less than a round trip delays nobody
_BATCH_S_MIN = 0.005
_TIMES_MAX = 8  # of a class: the newest, of which the quickest counts, since other work only adds time
# After this number of batches within the limit, one may have twice the samples: other work may have delayed
# its class before, or it has become quicker. Doubles with each such batch that changes nothing.
_PROBE_BATCHES_FIRST = 4
_PROBE_BATCHES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of batches and queues."""

    batch_samples_max: int = 4096  # also the limit of one request
    batch_requests_max: int = 256
    # a smaller batch waits `linger_s` for further requests; 1: an idle device starts at once
    batch_samples_min: int = 1
    linger_s: float = 0.0  # longest wait of a queue's oldest request for `batch_samples_min`
    queued_requests_max: int = 1024  # limit for all callers together; further requests are refused
    queued_bytes_max: int = 1 << 30  # limit for the tensors of queued requests
    queued_requests_per_caller_max: int = 128  # so that one caller cannot fill the queue

    def __post_init__(self) -> None:
        limits = (
            self.batch_samples_max,
            self.batch_requests_max,
            self.batch_samples_min,
            self.queued_requests_max,
            self.queued_bytes_max,
        )
        if min(*limits, self.queued_requests_per_caller_max) < 1 or self.linger_s < 0:
            raise UsageError("limits of batches and queues are at least 1, and no time is negative")
        if self.batch_samples_min > self.batch_samples_max:
            raise UsageError("a batch cannot wait for more samples than it may have")


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request. `cost` is the work that it takes, in samples of a forward pass."""

    number: int
    queue: Hashable  # expert and direction
    caller: Hashable
    samples: int
    size_bytes: int
    cost: float
    is_stranger: bool = False


@dataclass(slots=True)
class _Queue:
    # by number, in order of arrival, with the time of arrival
    waiting: dict[int, tuple[QueuedRequest, float]] = field(default_factory=dict)
    # a heap of (virtual start, number); entries of removed requests stay in it
    order: list[tuple[float, int]] = field(default_factory=list)
    samples: int = 0

    def head(self) -> tuple[float, int]:
        """Return the (virtual start, number) of the next request. The queue must not be empty."""
        while self.order[0][1] not in self.waiting:
            heapq.heappop(self.order)
        return self.order[0]

    def oldest_s(self) -> float:
        return next(iter(self.waiting.values()))[1]


class BatchRates:
    """How many samples of the requests of a queue are worth one batch, by the times that its batches took.

    Requests of one batch are answered together, when all of it is computed. Where a batch of twice the size
    takes twice the time, joining requests only makes the first of them wait; along a pipeline, micro-batches
    then travel in groups, and stages stand still between the groups. Where much of the time does not depend
    on the size, joining them is what makes a server fast.

    Times are measured by size class, the powers of two. A batch is made no larger than the smallest class
    that computes nearly as many samples a second as the best class.
    """

    def __init__(self) -> None:
        self._s_per_sample: dict[int, deque[float]] = {}  # by size class, the bit length of the samples
        self._rates: dict[int, float] = {}  # by size class: the best of its times, in samples per second
        self._chosen: int | None = None  # the largest size class that is worth one batch
        self._limit = 0  # in samples, if there is such a class
        self._within_limit = 0  # batches since the class was chosen, or one was larger
        self._probe_batches = _PROBE_BATCHES_FIRST

    @property
    def samples_max(self) -> int | None:
        """Return the most samples that are worth one batch; None when larger batches may be worth more."""
        if self._chosen is None:
            return None
        return self._limit * (2 if self._within_limit >= self._probe_batches else 1)

    def record(self, samples: int, seconds: float) -> None:
        """Record a batch and how long its computation took."""
        size_class = samples.bit_length()
        times = self._s_per_sample.setdefault(size_class, deque(maxlen=_TIMES_MAX))
        times.append(max(seconds, 1e-9) / samples)
        is_larger = self._chosen is not None and samples > self._limit
        before, rate = self._chosen, 1.0 / min(times)
        if self._rates.get(size_class) != rate:
            self._rates[size_class] = rate
            self._choose()
        if self._chosen != before:
            self._within_limit, self._probe_batches = 0, _PROBE_BATCHES_FIRST
        elif is_larger:
            self._within_limit, self._probe_batches = 0, min(2 * self._probe_batches, _PROBE_BATCHES_MAX)
        else:
            self._within_limit += 1

    def _choose(self) -> None:
        rates = self._rates
        enough = _RATE_SHARE_MIN * max(rates.values())
        chosen = min(size_class for size_class, rate in rates.items() if rate >= enough)
        # a class that is larger than all measured ones may be better still
        self._chosen = chosen if chosen < max(rates) else None
        self._limit = max((1 << chosen) - 1, int(rates[chosen] * _BATCH_S_MIN))


class Batcher:
    """The queues of one device."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.limits = limits or BatchLimits()
        self.queued_bytes = self._strangers_bytes = 0
        self._strangers_queued = 0
        self.queued_cost = 0.0
        self._queues: dict[Hashable, _Queue] = {}  # queues that have requests
        self._queue_of: dict[int, Hashable] = {}
        # a heap of (virtual start, number) of all queues; entries of removed requests stay in it
        self._order: list[tuple[float, int]] = []
        self._waiting_by_caller: dict[Hashable, int] = {}  # number of waiting requests
        self._virtual_ends: dict[Hashable, float] = {}  # the virtual end of each caller's last request
        self._virtual_time = 0.0
        # the most samples of a batch, for queues whose batches ran out of memory
        self._memory_limits: dict[Hashable, float] = {}
        self._rates: dict[Hashable, BatchRates] = {}  # the least recently used one is the first

    @property
    def queued(self) -> int:
        """Return the number of requests that wait."""
        return len(self._queue_of)

    def refusal(self, caller: Hashable, size_bytes: int, *, is_stranger: bool) -> str:
        """Return why such a request cannot wait here now; "" when it can."""
        limits = self.limits
        if is_stranger and self._strangers_queued:
            sum_bytes = self._strangers_bytes + size_bytes
            if (
                2 * self._strangers_queued >= limits.queued_requests_max
                or 2 * sum_bytes > limits.queued_bytes_max
            ):
                return (
                    f"strangers have their half of the queue: {self._strangers_bytes} bytes in "
                    f"{self._strangers_queued} of {len(self._queue_of)} queued"
                )
        if len(self._queue_of) >= limits.queued_requests_max:
            return f"the queue is full: {len(self._queue_of)} queued"
        if self.queued_bytes + size_bytes > limits.queued_bytes_max and self._queue_of:
            return f"the queue is full: {self.queued_bytes} bytes in {len(self._queue_of)} queued"
        if self._waiting_by_caller.get(caller, 0) >= limits.queued_requests_per_caller_max:
            own = self._waiting_by_caller[caller]
            return f"{own} requests of yours are queued already, of {len(self._queue_of)} queued"
        return ""

    def offer(self, request: QueuedRequest, now_s: float) -> str:
        """Queue a request. Return "", or the reason why it cannot wait; nothing has changed then."""
        assert 0 < request.samples <= self.limits.batch_samples_max
        refusal = self.refusal(request.caller, request.size_bytes, is_stranger=request.is_stranger)
        if refusal:
            return refusal
        start = max(self._virtual_time, self._virtual_ends.get(request.caller, 0.0))
        self._virtual_ends[request.caller] = start + request.cost
        if len(self._virtual_ends) > 2 * len(self._waiting_by_caller) + _IDLE_CALLERS_MAX:
            self._virtual_ends = {
                caller: end
                for caller, end in self._virtual_ends.items()
                if caller in self._waiting_by_caller or end > self._virtual_time
            }
        queue = self._queues.setdefault(request.queue, _Queue())
        queue.waiting[request.number] = (request, now_s)
        heapq.heappush(queue.order, (start, request.number))
        if len(queue.order) > 2 * len(queue.waiting) + _REMOVED_MAX:
            queue.order = [entry for entry in queue.order if entry[1] in queue.waiting]
            heapq.heapify(queue.order)
        queue.samples += request.samples
        self._queue_of[request.number] = request.queue
        heapq.heappush(self._order, (start, request.number))
        if len(self._order) > 2 * len(self._queue_of) + _REMOVED_MAX:
            self._order = [entry for entry in self._order if entry[1] in self._queue_of]
            heapq.heapify(self._order)
        self._waiting_by_caller[request.caller] = self._waiting_by_caller.get(request.caller, 0) + 1
        self._strangers_queued += request.is_stranger
        self._strangers_bytes += request.size_bytes if request.is_stranger else 0
        self.queued_bytes += request.size_bytes
        self.queued_cost += request.cost
        return ""

    def withdraw(self, number: int) -> bool:
        """Remove a request that no call waits for any longer. Return False when it is not queued."""
        if number not in self._queue_of:
            return False
        self._remove(number)
        return True

    def take(self, now_s: float) -> list[QueuedRequest]:
        """Return the next batch, all of one queue and in the order of their turns; [] when none is due
        yet.
        """
        first = self._first_due(now_s)
        if first is None:
            return []
        start, key = first
        self._virtual_time = max(self._virtual_time, start)
        queue, batch, samples = self._queues[key], list[QueuedRequest](), 0
        samples_max = min(self.samples_max(key), self._samples_worth(key))
        while queue.waiting and len(batch) < self.limits.batch_requests_max:
            request, _ = queue.waiting[queue.head()[1]]
            if batch and samples + request.samples > samples_max:
                break
            batch.append(request)
            samples += request.samples
            self._remove(request.number)
        if not self._queue_of:
            self._virtual_ends.clear()  # the queues are empty: all callers are equal again
        return batch

    def samples_max(self, queue: Hashable) -> int:
        """Return the most samples that a batch of this queue may have now; a single request may have more."""
        return int(self._memory_limits.get(queue, self.limits.batch_samples_max))

    def ran_out_of_memory(self, queue: Hashable, samples_fit: int) -> None:
        """Record that a batch of this queue was too large for the device, and that `samples_fit` samples were
        not. Later batches have no more at first.
        """
        self._memory_limits[queue] = min(max(samples_fit, 1), self.samples_max(queue))

    def succeeded(self, queue: Hashable) -> None:
        """Record that a batch of this queue was computed at once. If memory had set a limit, the next batch
        may be a little larger.
        """
        limit = self._memory_limits.get(queue)
        if limit is None:
            return
        limit *= 1.0 + 1.0 / _RECOVERY
        if limit < self.limits.batch_samples_max:
            self._memory_limits[queue] = limit
        else:
            del self._memory_limits[queue]

    def record(self, queue: Hashable, samples: int, seconds: float) -> None:
        """Record how long the computation of a batch of this queue took."""
        rates = self._rates.pop(queue, None) or BatchRates()
        self._rates[queue] = rates  # the most recently used one is the last
        if len(self._rates) > _RATES_MAX:
            del self._rates[next(iter(self._rates))]
        rates.record(samples, seconds)

    def due_s(self) -> float | None:
        """Return when the next batch is due, which may be in the past; None when no request waits."""
        times = [
            queue.oldest_s() + (0.0 if self._is_enough(key, queue) else self.limits.linger_s)
            for key, queue in self._queues.items()
        ]
        return min(times, default=None)

    def _first_due(self, now_s: float) -> tuple[float, Hashable] | None:
        """Return the virtual start and the queue of the next batch; None when none is due yet."""
        while self._order and self._order[0][1] not in self._queue_of:
            heapq.heappop(self._order)
        if not self._order:
            return None
        start, number = self._order[0]
        key = self._queue_of[number]
        if self._is_due(key, self._queues[key], now_s):
            return start, key
        due = [(queue.head(), key) for key, queue in self._queues.items() if self._is_due(key, queue, now_s)]
        if not due:
            return None
        (start, _), key = min(due, key=lambda one: one[0])
        return start, key

    def _is_due(self, key: Hashable, queue: _Queue, now_s: float) -> bool:
        return self._is_enough(key, queue) or queue.oldest_s() + self.limits.linger_s <= now_s

    def _is_enough(self, key: Hashable, queue: _Queue) -> bool:
        return queue.samples >= min(self.limits.batch_samples_min, self.samples_max(key))

    def _samples_worth(self, key: Hashable) -> int:
        """Return how many samples one batch may have before more of them only wait for one another."""
        limits, rates = self.limits, self._rates.get(key)
        worth = rates.samples_max if rates is not None else None
        return limits.batch_samples_max if worth is None else max(worth, limits.batch_samples_min)

    def _remove(self, number: int) -> None:
        key = self._queue_of.pop(number)
        queue = self._queues[key]
        request, _ = queue.waiting.pop(number)
        queue.samples -= request.samples
        if not queue.waiting:
            del self._queues[key]
        self._strangers_queued -= request.is_stranger
        self._strangers_bytes -= request.size_bytes if request.is_stranger else 0
        self.queued_bytes -= request.size_bytes
        self.queued_cost = self.queued_cost - request.cost if self._queue_of else 0.0
        left = self._waiting_by_caller[request.caller] - 1
        if left:
            self._waiting_by_caller[request.caller] = left
        else:
            del self._waiting_by_caller[request.caller]
