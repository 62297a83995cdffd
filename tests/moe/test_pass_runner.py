"""Tests of what a server keeps of the passes that it has computed."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch

from moe.protocol.names import ExpertUid
from moe.protocol.tensors import encode
from moe.server.expert import Expert
from moe.server.jobs import Outcome
from moe.server.pass_runner import PassRunner
from moe.server.requests import AdmittedRequest, HostedExpert
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest
from tests.moe.computing import job_of

WIDTH = 4


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
