"""Tests of how a server runs requests, and of what it keeps of the passes that it has computed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch

from moe.protocol.names import ExpertUid
from moe.protocol.tensors import encode, join_payloads
from moe.server.expert import Expert
from moe.server.jobs import Job, Outcome
from moe.server.pass_runner import PassRunner
from moe.server.requests import AdmittedRequest, HostedExpert, RequestRefused
from swarm.core.ids import PeerId
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest
from tests.moe.computing import headers_of, job_of

WIDTH = 4
CALLER = PeerId(bytes(32))


def test_a_kept_answer_does_not_hold_the_memory_of_its_batch() -> None:
    expert = Expert(torch.nn.Identity(), (torch.zeros(1, WIDTH),))
    given = torch.ones(1, WIDTH)
    job = job_of(expert, [given], [given])
    batch = torch.randn(1000, WIDTH)
    outcome = Outcome(encode([batch[3:4]], None), 1)
    admitted = AdmittedRequest(
        hosted=HostedExpert(ExpertUid.parse("ffn.0"), expert, cast(Any, None), 8, Counter()),
        caller=job.caller,
        request=ExpertRequest(kind=expert_pb2.EXPERT_BACKWARD, uid="ffn.0", request_id=job.pass_id[1]),
        headers=[],
        leaves=[],
        size_bytes=0,
        answer_bytes=outcome.size_bytes,
        codec=None,
        is_backward=True,
        kept=None,
    )
    with ThreadPoolExecutor() as pool:
        runner = PassRunner({}, pool, lambda caller: False)
        runner.on_results([(job, outcome)])
        kept = runner.begin(admitted, b"")
    assert isinstance(kept, Outcome)
    values = np.frombuffer(kept.payloads[0].payload, np.float32)
    assert values.tolist() == batch[3].tolist()
    assert not np.shares_memory(values, batch.numpy())


class Computing:
    """A stand-in for a computing thread, which has room for all jobs. `on_jobs` is called with them."""

    decodes_on_device = False

    def __init__(self, on_jobs: Callable[[Sequence[Job]], None]) -> None:
        self._on_jobs = on_jobs

    def offer(self, jobs: Sequence[Job], *, wake: bool) -> list[str]:
        self._on_jobs(jobs)
        return [""] * len(jobs)


def outcomes_of(
    requests: Sequence[ExpertRequest], change: Callable[[Job], None] = lambda job: None
) -> tuple[PassRunner, dict[int, Outcome | RequestRefused]]:
    """Run requests of one message, one tensor each. `change` is called with each job while it is queued."""
    expert = Expert(torch.nn.Identity(), (torch.zeros(1, WIDTH),))
    payloads = encode([torch.ones(1, WIDTH)], None)
    payload = torch.frombuffer(bytearray(join_payloads(payloads)), dtype=torch.uint8)
    found: dict[int, Outcome | RequestRefused] = {}

    async def answer(outcomes: Mapping[int, Outcome | RequestRefused]) -> None:
        assert not found.keys() & outcomes.keys()
        found.update(outcomes)

    def compute(jobs: Sequence[Job]) -> None:
        for job in jobs:
            change(job)
        done = [(job, Outcome((), 1)) for job in jobs]
        asyncio.get_running_loop().call_soon(runner.on_results, done)

    hosted = HostedExpert(ExpertUid.parse("ffn.0"), expert, cast(Any, Computing(compute)), 8)
    admitted = {
        number: AdmittedRequest(
            hosted=hosted,
            caller=CALLER,
            request=request,
            headers=headers_of(payloads),
            leaves=expert.schema.input_leaves,
            size_bytes=len(payload),
            answer_bytes=len(payload),
            codec=None,
            is_backward=request.kind == expert_pb2.EXPERT_BACKWARD,
            kept=None,
        )
        for number, request in enumerate(requests)
    }
    with ThreadPoolExecutor() as pool:
        runner = PassRunner({}, pool, lambda caller: False)
        asyncio.run(runner.run_together(admitted, dict.fromkeys(admitted, payload), answer))
    assert found.keys() == admitted.keys()
    return runner, found


def request_of(number: int, **fields: Any) -> ExpertRequest:
    return ExpertRequest(uid="ffn.0", request_id=bytes([number]) * 16, batch=1, **fields)


def test_a_request_whose_inputs_were_forgotten_meanwhile_does_not_fail_the_others_of_its_message() -> None:
    """Regression: a repetition whose first attempt had failed since it was admitted ended the whole message,
    and the jobs of the requests before it were kept forever.
    """
    repeated = request_of(1, kind=expert_pb2.EXPERT_BACKWARD, inputs_kept=True)
    _, found = outcomes_of([request_of(0), repeated, request_of(2)])
    assert isinstance(found[0], Outcome)
    assert isinstance(found[2], Outcome)
    assert isinstance(found[1], RequestRefused)
    assert found[1].status == expert_pb2.EXPERT_FORGOTTEN


def test_a_backward_pass_that_is_in_a_message_twice_is_computed_once() -> None:
    jobs: list[Job] = []
    backward = request_of(1, kind=expert_pb2.EXPERT_BACKWARD)
    _, found = outcomes_of([backward, backward], jobs.append)
    assert len(jobs) == 1
    assert found[0] == found[1]


def test_inputs_that_a_module_writes_into_at_once_are_not_kept() -> None:
    """Regression: the versions of the tensors were looked at when the computing thread had them already."""
    runner, _ = outcomes_of([request_of(1, keep=True)])
    assert runner.kept_inputs(CALLER, request_of(1)).shape == (1, 0)
    runner, _ = outcomes_of([request_of(1, keep=True)], lambda job: cast(Any, job.inputs[0]).add_(1.0))
    with pytest.raises(RequestRefused, match="not kept here any more"):
        runner.kept_inputs(CALLER, request_of(1))
