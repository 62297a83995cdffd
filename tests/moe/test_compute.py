"""The computing thread: out-of-memory errors, lost devices, and copies that overlap computation."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.server.expert import Expert
from moe.server.logic.batching import BatchLimits
from tests.moe.computing import TIMEOUT_S, batching_of, computing, job_of, sgd, tensors_of
from tests.moe.late_link import LateLink

WIDTH = 6
LINKS = pytest.mark.parametrize("linked", [False, True], ids=["host", "link"])


def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, WIDTH))


class Small(torch.nn.Module):
    """A module whose device has memory for `capacity` samples at once."""

    def __init__(self, inner: torch.nn.Module, capacity: int) -> None:
        super().__init__()
        self.inner, self.capacity = inner, capacity
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        y = self.inner(x)
        if len(x) > self.capacity:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return y  # type: ignore[no-any-return]


class RunsOutInBackward(torch.autograd.Function):
    """A module that runs out of memory half-way through the backward pass, when later layers have gradients
    already.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, capacity: int) -> torch.Tensor:
        ctx.capacity = capacity
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if len(gradients[0]) > ctx.capacity:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradients[0], None


class SmallBackward(torch.nn.Module):
    def __init__(self, inner: torch.nn.Sequential, capacity: int) -> None:
        super().__init__()
        self.inner, self.capacity = inner, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner[1](self.inner[0](x))
        return self.inner[2](RunsOutInBackward.apply(hidden, self.capacity))  # type: ignore[no-any-return]


def batches(count: int, seed: int, samples: int = 2) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(samples, WIDTH, generator=chance) for _ in range(count)]


@LINKS
@pytest.mark.parametrize("seed", range(2))
def test_a_forward_batch_that_runs_out_of_memory_is_answered_in_smaller_ones(linked: bool, seed: int) -> None:
    module = Small(network(), capacity=1 << 30)
    expert = Expert(module, (torch.zeros(1, WIDTH),))
    module.capacity = 5
    link = LateLink() if linked else None
    with computing(link, batching_of(16)) as compute:
        given = batches(8, seed)
        jobs = [compute.job(expert, [x]) for x in given]
        outcomes = compute.run(*jobs)
        for x, job, outcome in zip(given, jobs, outcomes, strict=True):
            (y,) = tensors_of(job, outcome)
            assert y is not None
            assert torch.allclose(y, module.inner(x), atol=1e-6)
        assert module.sizes[1:] == [16, 8, 4, 4, 8, 4, 4]
        if link is not None:
            assert link.emptied == 3
        # the size that fitted limits the next batch
        module.sizes.clear()
        compute.run(*[compute.job(expert, [x]) for x in batches(8, seed)])
        assert max(module.sizes) == 4
        counts = compute.thread.counts["ffn.0"]
        assert (counts.forward_requests, counts.failed_requests) == (16, 0)


@LINKS
def test_a_single_request_that_does_not_fit_fails_with_a_sentence_and_the_others_are_answered(
    linked: bool,
) -> None:
    module = Small(network(), capacity=1 << 30)
    expert = Expert(module, (torch.zeros(1, WIDTH),))
    module.capacity = 5
    with computing(LateLink() if linked else None, batching_of(14)) as compute:
        (large,) = batches(1, 0, samples=10)
        jobs = [compute.job(expert, [x]) for x in (*batches(1, 1), large, *batches(1, 2))]
        outcomes = compute.run(*jobs)
        assert [bool(outcome.failure) for outcome in outcomes] == [False, True, False]
        assert (
            outcomes[1].failure
            == "its 10 samples do not fit into the memory of the server's cpu: send fewer at a time"
        )


@LINKS
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("capacity", [1, 5, 7])
def test_a_backward_batch_that_runs_out_of_memory_makes_one_step_equal_to_that_of_the_whole_batch(
    linked: bool, kind: str, capacity: int
) -> None:
    inner: Any = network()
    local = copy.deepcopy(inner)
    module: Any = Small(inner, 1 << 30) if kind == "forward" else SmallBackward(inner, 1 << 30)
    expert = Expert(module, (torch.zeros(1, WIDTH),), sgd, clip_norm=0.5)
    module.capacity = capacity
    with computing(LateLink() if linked else None, batching_of(6)) as compute:
        given, gradients = batches(6, 0, samples=1), batches(6, 1, samples=1)
        jobs = [compute.job(expert, [x], [gradient]) for x, gradient in zip(given, gradients, strict=True)]
        outcomes = compute.run(*jobs)
        x = torch.cat(given).requires_grad_()
        local(x).backward(torch.cat(gradients))
        torch.nn.utils.clip_grad_norm_(local.parameters(), 0.5)
        sgd(local.parameters()).step()
        assert x.grad is not None
        found = [tensors_of(job, outcome)[0] for job, outcome in zip(jobs, outcomes, strict=True)]
        assert torch.allclose(torch.cat([one for one in found if one is not None]), x.grad, atol=1e-6)
        assert expert.version == 1
        assert expert.samples == 6
        for one, other in zip(inner.parameters(), local.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)
            assert one.grad is None


@LINKS
def test_a_backward_request_that_does_not_fit_leaves_nothing_in_the_step_of_the_others(linked: bool) -> None:
    inner: Any = network()
    local = copy.deepcopy(inner)
    module = SmallBackward(inner, 1 << 30)
    expert = Expert(module, (torch.zeros(1, WIDTH),), sgd)
    module.capacity = 3
    with computing(LateLink() if linked else None, batching_of(12)) as compute:
        given = [*batches(1, 0), *batches(1, 1, samples=8), *batches(1, 2)]
        jobs = [compute.job(expert, [x], [torch.ones_like(x)]) for x in given]
        outcomes = compute.run(*jobs)
        assert [bool(outcome.failure) for outcome in outcomes] == [False, True, False]
        assert "do not fit into the memory" in outcomes[1].failure
        local(torch.cat([given[0], given[2]])).sum().backward()
        sgd(local.parameters()).step()
        assert expert.version == 1
        assert expert.samples == 4
        for one, other in zip(inner.parameters(), local.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def test_inputs_that_do_not_fit_are_copied_in_smaller_parts() -> None:
    link = LateLink()
    module = network()
    expert = Expert(module, (torch.zeros(1, WIDTH),))
    with computing(link, batching_of(16)) as compute:
        given = batches(8, 0)
        jobs = [compute.job(expert, [x]) for x in given]
        link.lacks_memory_for = sum(x.nbytes for x in given) // 2
        for x, job, outcome in zip(given, jobs, compute.run(*jobs), strict=True):
            (y,) = tensors_of(job, outcome)
            assert y is not None
            assert torch.allclose(y, module(x), atol=1e-6)


def test_an_activation_that_does_not_fit_is_not_kept_and_its_request_is_answered() -> None:
    class Keeps(torch.nn.Module):
        """A module that runs out of memory when gradients are enabled."""

        short = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.short and torch.is_grad_enabled():
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return 2 * x

    module = Keeps()
    expert = Expert(module, (torch.zeros(1, WIDTH),), keep_activations_bytes=1 << 20)
    module.short = True
    with computing() as compute:
        (x,) = batches(1, 0)
        job = compute.job(expert, [x])
        object.__setattr__(job, "keep", True)
        (y,) = tensors_of(job, compute.run(job)[0])
        assert y is not None
        assert torch.equal(y, 2 * x)


class Failing(torch.nn.Module):
    """A module that fails as CUDA does on an index out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return x + 1


@LINKS
def test_a_lost_device_answers_its_batch_takes_no_more_and_is_reported_once(linked: bool) -> None:
    module = Failing()
    expert = Expert(module, (torch.zeros(1, WIDTH),))
    with computing(LateLink() if linked else None, batching_of(4)) as compute:
        module.broken = True
        jobs = [compute.job(expert, [x]) for x in batches(2, 0)]
        for outcome in compute.run(*jobs):
            assert outcome.failure == (
                "cpu cannot be used any more until the server's process ends: "
                "CUDA error: device-side assert triggered"
            )
        assert compute.reported.get(timeout=TIMEOUT_S).device == expert.device
        assert (
            "cannot be used any more"
            in compute.thread.offer([compute.job(expert, [torch.ones(1, WIDTH)])])[0]
        )
    assert compute.reported.empty()


@pytest.mark.parametrize("event", ["in", "used", "out", "waiting"])
def test_a_device_that_is_lost_during_any_copy_answers_its_batch(event: str) -> None:
    link = LateLink()
    link.fails = {event}
    expert = Expert(network(), (torch.zeros(1, WIDTH),))
    with computing(link) as compute:
        job = compute.job(expert, batches(1, 0))
        assert "device-side assert" in compute.run(job)[0].failure
        assert compute.reported.get(timeout=TIMEOUT_S).device == expert.device


class Noted(torch.nn.Module):
    """A module that tells the link when it computes."""

    def __init__(self, link: LateLink) -> None:
        super().__init__()
        self.link = link
        self.open, self.threads = threading.Event(), set[str]()
        self.open.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.link.note("compute")
        self.threads.add(threading.current_thread().name)
        assert self.open.wait(TIMEOUT_S)
        return x + 1


def noted(link: LateLink) -> tuple[Noted, Expert]:
    module = Noted(link)
    made = Expert(module, (torch.zeros(1, WIDTH),))
    link.clear()
    module.threads.clear()
    return module, made


def test_copies_of_neighbouring_batches_run_beside_the_computation() -> None:
    """Each line waits for an event, and would wait forever if the stages waited for each other."""
    link = LateLink()
    module, expert = noted(link)
    with computing(link, BatchLimits(batch_requests_max=1)) as compute:
        link.open_landing.clear()
        first, second, third = [compute.job(expert, [x]) for x in batches(3, 0)]
        assert compute.thread.offer([first]) == [""]
        link.until("waiting", 0)  # the first result is on its way to the host
        module.open.clear()
        assert compute.thread.offer([second]) == [""]
        link.until("compute", 1)  # the second is computed although the first has not arrived
        assert compute.thread.offer([third]) == [""]
        link.until("in", 2)  # the third is copied in meanwhile
        assert ("landed", 0) not in link.events
        assert compute.thread.unfinished == 3
        module.open.set()
        link.until("out", 1)
        link.open_landing.set()
        for job, outcome in zip((first, second, third), compute.results(first, second, third), strict=True):
            (y,) = tensors_of(job, outcome)
            assert y is not None
        assert module.threads == {"swarm-experts"}
    for number in range(3):
        order = [link.place(name, number) for name in ("in", "used", "compute", "out", "waiting", "landed")]
        assert order == sorted(order)


def test_no_more_than_three_batches_are_under_way() -> None:
    link = LateLink()
    _, expert = noted(link)
    with computing(link, BatchLimits(batch_requests_max=1)) as compute:
        link.open_landing.clear()
        jobs = [compute.job(expert, [x]) for x in batches(6, 0)]
        for job in jobs:
            assert compute.thread.offer([job]) == [""]
        link.until("out", 2)
        assert compute.thread.queued == 3
        assert ("in", 3) not in link.events
        assert compute.thread.wait_s >= 0
        link.open_landing.set()
        compute.results(*jobs)
        assert compute.thread.unfinished == 0


@pytest.mark.parametrize("codec", ["", "float16", "bfloat16", "int8", "int4"])
def test_a_link_gives_the_same_bytes_as_the_host(codec: str) -> None:
    module = network()
    experts = [Expert(copy.deepcopy(module), (torch.zeros(1, WIDTH),), sgd) for _ in range(2)]
    found: list[list[bytes]] = []
    for expert, link in zip(experts, (None, LateLink()), strict=True):
        with computing(link, batching_of(6)) as compute:
            forward = [compute.job(expert, [x], codec=codec) for x in batches(3, 0)]
            outcomes = compute.run(*forward)
            backward = [
                compute.job(expert, [x], [y], codec=codec)
                for x, y in zip(batches(3, 0), batches(3, 1), strict=True)
            ]
            outcomes += compute.run(*backward)
            found.append([bytes(piece.payload) for outcome in outcomes for piece in outcome.payloads])
            assert {piece.codec for outcome in outcomes for piece in outcome.payloads} == {
                forward[0].codec.wire_id if forward[0].codec else 0
            }
    assert found[0] == found[1]
    for one, other in zip(experts[0].module.parameters(), experts[1].module.parameters(), strict=True):
        assert torch.equal(one, other)


class Spreading(torch.nn.Module):
    """A module in which one bad sample turns its whole batch into NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.log(1 - x.amax() / 13)


@LINKS
def test_nan_in_one_request_fails_only_that_request(linked: bool) -> None:
    expert = Expert(Spreading(), (torch.zeros(1, WIDTH),))
    with computing(LateLink() if linked else None, batching_of(6)) as compute:
        good, bad, other = (torch.full((2, WIDTH), value) for value in (1.0, 14.0, 2.0))
        jobs = [compute.job(expert, [x]) for x in (good, bad, other)]
        outcomes = compute.run(*jobs)
        assert outcomes[1].failure == "the expert made NaN or infinity of this request"
        for x, job, outcome in ((good, jobs[0], outcomes[0]), (other, jobs[2], outcomes[2])):
            (y,) = tensors_of(job, outcome)
            assert y is not None
            assert torch.equal(y, x)
        assert compute.thread.counts["ffn.0"].failed_requests == 1


def test_computing_on_the_host_uses_one_thread_and_copies_no_tensor() -> None:
    before = set(threading.enumerate())
    expert = Expert(torch.nn.Identity(), (torch.zeros(1, WIDTH),))
    with computing() as compute:
        assert len(set(threading.enumerate()) - before) == 1
        job = compute.job(expert, batches(1, 0))
        (piece,) = compute.run(job)[0].payloads
        given = job.inputs[0]
        assert isinstance(given, torch.Tensor)
        assert torch.frombuffer(piece.payload, dtype=torch.float32).data_ptr() == given.data_ptr()


def test_the_thread_says_which_results_are_followed_by_others_at_once() -> None:
    expert = Expert(torch.nn.Identity(), (torch.zeros(1, WIDTH),))
    with computing(config=BatchLimits(batch_requests_max=1)) as compute:
        compute.run(*[compute.job(expert, [x]) for x in batches(3, 0)])
    assert compute.deliveries == [(1, True), (1, True), (1, False)]


def test_shorter_sequences_are_batches_of_their_own_and_cost_less() -> None:
    module: Any = torch.nn.Identity()
    module.sequence_dimension = 1
    expert = Expert(module, (torch.zeros(1, 8, WIDTH),))
    job = job_of(expert, [torch.zeros(2, 8, WIDTH)])
    whole, half = (replace(job, sequence_length=length) for length in (8, 4))
    assert whole.kind != half.kind
    assert (whole.cost, half.cost) == (2.0, 1.0)
