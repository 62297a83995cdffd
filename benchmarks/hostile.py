"""Training with a quarter of hostile peers: the loss under each aggregation, and the time that each takes.

Eight peers train the byte-level model, each on its own draw of the text; gradients are encoded, cut into
chunks and reduced with the code of a round, in this process and without a network, which does not matter
here. Two of the peers lie, always in the same way. The losses follow from seeds and are equal in every run on
one machine.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from averaging.allreduce.auditing import Auditor, sign
from averaging.allreduce.kernels import Averaged, ReductionKernels
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.audit import Notary
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.framing import unpack
from averaging.reduction.partition import Plan, plan_chunks
from averaging.reduction.reduce import Contribution, ReductionJob
from averaging.reduction.robust import MEAN, Aggregation
from averaging.reduction.vector import FlatVector
from benchmarks.results import Aim, Row, Series
from swarm.compression import find
from swarm.core.ids import Contact
from swarm.run.task import Draw
from swarm.run.tasks.bytelm_model import ByteData, ByteTransformer
from swarm.run.tasks.corpus import read_corpus
from swarm.testing.identities import SeededIdentity

PEERS, LIARS = 8, 2
CODEC = "float16"
CONTEXT = 32
SAMPLES = 32  # per peer and step
STEPS = 100
COST_ELEMENTS = 1_000_000
COST_ROUNDS = 9
LOSS_OVER_HONEST_MAX = 1.05
LOSS_MAX = 100.0  # nats per byte; a larger loss, or NaN, is shown as this

RULES: dict[str, Aggregation] = {
    "mean": MEAN,
    "mean, clip_to_median=10": Aggregation(clip_to_median=10.0),
    "trimmed_mean": Aggregation(rule="trimmed_mean"),
    "median": Aggregation(rule="median"),
    "centered_clip": Aggregation(rule="centered_clip"),
}
ROBUST = ("trimmed_mean", "median", "centered_clip")

Lie = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
LIES: dict[str, Lie] = {
    "sign-flipped": lambda gradient, _: -gradient,
    "sign-flipped ×10": lambda gradient, _: gradient * -10.0,
    "scaled ×100": lambda gradient, _: gradient * 100.0,
    "random, ×10 as long": lambda gradient, chance: (
        torch.randn(gradient.numel(), generator=chance) * (10.0 * gradient.std())
    ),
    "all-zero": lambda gradient, _: torch.zeros_like(gradient),
}


@functools.cache
def _corpus_of(data_bytes: int) -> ByteData:
    corpus = read_corpus(None, bytes_max=data_bytes, sample_bytes=CONTEXT + 1)
    return ByteData(corpus, context=CONTEXT, device=torch.device("cpu"))


class Diverged(Exception):
    """The gradients of an honest peer have become infinite or NaN."""


def average(vectors: Sequence[torch.Tensor], aggregation: Aggregation) -> torch.Tensor:
    """Return the average that a round makes of these vectors: the first peer reduces each chunk, and the
    others' values are encoded as they travel.
    """
    codec, numel = find(CODEC), vectors[0].numel()
    plan = plan_chunks(numel, [1.0, *[0.0] * (len(vectors) - 1)], codec, 1 << 14)
    all_kernels = [
        ReductionKernels(
            plan, codec, 0, FlatVector([vector]), Averages(plan, codec, ResultBuffer()), aggregation
        )
        for vector in vectors
    ]
    reducer = all_kernels[0]
    sent = [kernels.encode(plan.chunks) for kernels in all_kernels[1:]]
    for chunk in plan.chunks:
        given = [Contribution(0, 1.0, reducer.own_values(chunk))]
        for place, messages in enumerate(sent, 1):
            message = messages[chunk.index]
            if isinstance(message, int):
                raise Diverged
            given.append(Contribution(place, 1.0, unpack(message)[1]))
        (done,) = reducer.reduce([ReductionJob(chunk, given)])
        assert isinstance(done, Averaged)
    return reducer.averages.decoded()


def train(
    aggregation: Aggregation,
    lie: Lie | None,
    *,
    steps: int = STEPS,
    samples: int = SAMPLES,
    data_bytes: int = 4 << 20,
) -> float:
    """Return the loss on held-out text (nats per byte) after `steps` steps. The last `LIARS` peers send `lie`
    of their gradient.
    """
    model = ByteTransformer(width=32, layers=1, heads=4, context=CONTEXT, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = _corpus_of(data_bytes)
    chance = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    peer_ids = [SeededIdentity(f"hostile/{place}").peer_id for place in range(PEERS)]
    for step in range(steps):
        vectors = []
        for place in range(PEERS):
            data.start_epoch(Draw("hostile", step, peer_ids[place]))
            optimizer.zero_grad()
            data.loss(model, samples).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            vectors.append(lie(gradient, chance) if lie is not None and place >= PEERS - LIARS else gradient)
        try:
            averaged = average(vectors, aggregation)
        except Diverged:
            return LOSS_MAX
        offset = 0
        for parameter in parameters:
            parameter.grad = averaged[offset : offset + parameter.numel()].view_as(parameter).clone()
            offset += parameter.numel()
        optimizer.step()
    loss = data.validation_loss(model)
    return loss if loss < LOSS_MAX else LOSS_MAX  # also for NaN


def losses(say: Callable[[str], None], *, steps: int = STEPS) -> list[Row]:
    """Measure every kind of false gradient under every aggregation, compared with the training of honest
    peers.
    """
    honest = train(MEAN, None, steps=steps)
    say(f"nobody lies: {honest:.3f} nats per byte after {steps} steps")
    found = []
    for nth, (lie_name, lie) in enumerate(LIES.items()):
        reached = {rule: train(aggregation, lie, steps=steps) for rule, aggregation in RULES.items()}
        say(
            f"{LIARS} of {PEERS} send {lie_name} gradients: "
            + ", ".join(f"{rule} {loss:.3f}" for rule, loss in reached.items())
        )
        found += [
            Row(
                identifier=f"hostile-loss-{nth}-{_slug(rule)}",
                workload=f"training, {LIARS} of {PEERS} peers send {lie_name} gradients: {rule}",
                quantity=f"held-out loss after {steps} steps",
                ours=Series(name=f"swarm {rule}: loss", unit="nats/byte", samples=(loss,)),
                peer=Series(name="honest peers, mean: loss", unit="nats/byte", samples=(honest,)),
                aim=Aim(of="ours / peer", sense="at most", value=LOSS_OVER_HONEST_MAX)
                if rule in ROBUST
                else None,
                shown="ours / peer",
            )
            for rule, loss in reached.items()
        ]
    return found


def costs(
    say: Callable[[str], None], *, elements: int = COST_ELEMENTS, rounds: int = COST_ROUNDS
) -> list[Row]:
    """Reducing what eight peers sent, one thread: each aggregation in turn, and what an audit adds per
    contribution.
    """
    codec = find(CODEC)
    plan = plan_chunks(elements, [1.0], codec, 1 << 20)
    chance = torch.Generator().manual_seed(2)
    vectors = [torch.randn(elements, generator=chance) for _ in range(PEERS)]
    all_kernels = [
        ReductionKernels(plan, codec, 0, FlatVector([vector]), Averages(plan, codec, ResultBuffer()))
        for vector in vectors
    ]
    jobs = [
        ReductionJob(
            chunk,
            [Contribution(place, 1.0, kernels.encoded(chunk)) for place, kernels in enumerate(all_kernels)],
        )
        for chunk in plan.chunks
    ]
    reducers = {
        rule: ReductionKernels(
            plan, codec, 0, FlatVector([vectors[0]]), Averages(plan, codec, ResultBuffer()), aggregation
        )
        for rule, aggregation in RULES.items()
    }
    work: dict[str, Callable[[], object]] = {
        rule: functools.partial(kernels.reduce, jobs) for rule, kernels in reducers.items()
    }
    work["audit: sign and check the contributions"] = functools.partial(_sign_and_check, plan, jobs)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for nth in range(rounds + 1):
        for name, function in work.items():
            started_s = time.perf_counter()
            function()
            if nth:  # the first is a warm-up
                taken[name].append(time.perf_counter() - started_s)
    workload = f"reduce {PEERS} × {elements / 1e6:g} M parameters, {CODEC}, one thread"
    mean = Series(name="the mean: reduce", unit="s", samples=tuple(taken["mean"]))
    say(", ".join(f"{name} {min(samples) * 1e3:.1f} ms" for name, samples in taken.items()))
    return [
        Row(
            identifier=f"hostile-cost-{_slug(name)}",
            workload=f"{workload}: {name}",
            quantity="decode, aggregate, encode, digest" if name in RULES else "beside that",
            ours=Series(name=f"swarm {name}: reduce", unit="s", samples=tuple(samples)),
            peer=None if name == "mean" else mean,
            aim=None,
            shown="ours / peer",
        )
        for name, samples in taken.items()
    ]


def _sign_and_check(plan: Plan, jobs: Sequence[ReductionJob]) -> None:
    """Do the work of audits in every round, even without a draw: sign chunks and check the signatures."""
    identity = SeededIdentity("hostile/signer")
    member = Member(contact=Contact(identity.peer_id, ()), weight=1.0, bandwidth=1.0)
    group = Group(group_id=bytes(32), members=(member,), codec=CODEC, gathered=(b"",))
    kernels = ReductionKernels(
        plan, find(CODEC), 0, FlatVector([]), Averages(plan, find(CODEC), ResultBuffer())
    )
    auditor = Auditor(group, kernels, Notary(identity, random.Random(0)), 0.1)
    for job in jobs:
        for item in job.contributions:
            payload = memoryview(item.values)  # type: ignore[arg-type]
            signature = sign(identity, group.group_id, job.chunk.index, payload)
            auditor.accept(0, job.chunk.index, payload, signature)


def rows(say: Callable[[str], None]) -> list[Row]:
    """Measure the section and return its rows."""
    with one_thread():
        return [*costs(say), *losses(say)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to the calling thread within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _slug(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name.partition(":")[0]).strip(
        "-"
    )
