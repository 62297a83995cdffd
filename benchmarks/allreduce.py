"""All-reduce of four peers on loopback: swarm compared with hivemind, gloo and the bare transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.environments import HIVEMIND_VERSION, OWN_PYTHON
from benchmarks.interleaving import Plan, Tally, interleave
from benchmarks.measured_systems import Bare, MeasuredSystem, Round, Workers, Workload
from benchmarks.results import Aim, Row, Series

MIB = 1 << 20
TENSORS = 16
PEERS = 4
CODEC_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
HIVEMIND = f"hivemind {HIVEMIND_VERSION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that all workloads of one run share."""

    plan: Plan
    hivemind: Path | None  # its interpreter; None leaves hivemind out
    copy_bytes_per_s: float
    say: Callable[[str], None]


def whole(outcome: Round) -> float:
    return outcome.whole_s


def reduction(outcome: Round) -> float:
    return outcome.reduce_s


def ours(workload: Workload) -> Workers:
    return Workers(f"swarm {workload.codec}", python=OWN_PYTHON, module="swarm_averager", workload=workload)


def rows(setting: Setting, *, vector_mib: int) -> list[Row]:
    """Measure one vector size and return its rows. Systems that share a ratio take turns."""
    elements = vector_mib * MIB // 4

    def load(codec: str) -> Workload:
        return Workload(elements=elements, tensors=TENSORS, peers=PEERS, target_group_size=PEERS, codec=codec)

    def own(codec: str) -> Callable[[], MeasuredSystem]:
        return partial(ours, load(codec))

    def theirs(codec: str) -> Callable[[], MeasuredSystem]:
        assert setting.hivemind is not None
        return partial(
            Workers,
            f"{HIVEMIND} {codec}",
            python=setting.hivemind,
            module="hivemind_averager",
            workload=load(codec),
        )

    gloo = partial(Workers, "gloo", python=OWN_PYTHON, module="gloo", workload=load("float32"))
    bare = partial(Bare, load("float32"))

    def turns(names: Sequence[str], makers: Sequence[Callable[[], MeasuredSystem]]) -> list[Tally]:
        setting.say(f"all-reduce, {PEERS} × {vector_mib} MiB: {', '.join(names)}")
        return interleave(makers, names, setting.plan, setting.say)

    float32, bare_tally, gloo_tally = turns(
        ["swarm float32", "bare grpc.aio with TLS", "gloo float32"], [own("float32"), bare, gloo]
    )
    found = [
        _row(setting, float32, other, vector_mib, "float32", name, _at_most(times))
        for name, other, times in (("bare", bare_tally, 1.1), ("gloo", gloo_tally, 3.5))
    ]
    names = ["swarm float16", "swarm bfloat16"]
    if setting.hivemind is None:
        half, bfloat = turns(names, [own("float16"), own("bfloat16")])
        alone = {"float16": half, "bfloat16": bfloat}
        return [
            *found,
            *(_row(setting, tally, None, vector_mib, codec, "alone", None) for codec, tally in alone.items()),
            *_per_core(vector_mib, {"float32": float32, **alone}),
        ]
    half, bfloat, their_half = turns(
        [*names, f"{HIVEMIND} float16"], [own("float16"), own("bfloat16"), theirs("float16")]
    )
    # not in turn with others: four systems need more memory than some machines have
    (their_full,) = turns([f"{HIVEMIND} uncompressed"], [theirs("float32")])
    aim = Aim(of="peer / ours", sense="at least", value=5.0 if vector_mib <= 64 else 4.0)
    for name, quantity in (("hivemind", "reduce"), ("hivemind-whole", "whole")):
        found.append(_row(setting, half, their_half, vector_mib, "float16", name, aim, quantity))
        # hivemind has no bfloat16; float16 has the same size
        found.append(_row(setting, bfloat, their_half, vector_mib, "bfloat16", name, None, quantity))
        found.append(_row(setting, float32, their_full, vector_mib, "float32", name, None, quantity))
    tallies = {"float32": float32, "float16": half, "bfloat16": bfloat}
    return [*found, *_per_core(vector_mib, tallies)]


def _per_core(vector_mib: int, tallies: Mapping[str, Tally]) -> list[Row]:
    """Return the link that one core of a peer fills, by the processor time of its rounds. On one machine all
    peers share the cores; in a swarm each has its own.
    """

    def gbit_per_s(codec: str) -> Callable[[Round], float]:
        sent_bytes = 2 * (PEERS - 1) / PEERS * vector_mib * MIB // 4 * CODEC_BYTES[codec]
        return lambda outcome: 8 * sent_bytes / (outcome.processor_s / PEERS) / 1e9

    return [
        Row(
            identifier=f"allreduce-{vector_mib}-{codec}-core",
            workload=f"all-reduce, {PEERS} peers × {vector_mib} MiB, {codec}",
            quantity="Gbit/s each way that one core of a peer sends and receives, extrapolated from the "
            "processor time of all peers, matchmaking included",
            ours=tally.series("a core", gbit_per_s(codec), unit="Gbit/s"),
            peer=None,
            aim=None,
        )
        for codec, tally in tallies.items()
    ]


def _at_most(times: float) -> Aim:
    return Aim(of="ours / peer", sense="at most", value=times)


def _row(
    setting: Setting,
    own: Tally,
    peer: Tally | None,
    vector_mib: int,
    codec: str,
    against: str,
    aim: Aim | None,
    quantity: str = "reduce",
) -> Row:
    words, of = (
        ("all-reduce alone", reduction)
        if quantity == "reduce"
        else ("whole step, matchmaking included", whole)
    )
    if against == "bare":
        words += "; the peer moves the same bytes and reduces nothing"

    def series(tally: Tally) -> Series:
        return tally.series("whole step" if quantity == "whole" else "all-reduce", of)

    return Row(
        identifier=f"allreduce-{vector_mib}-{codec}-{against}",
        workload=f"all-reduce, {PEERS} peers × {vector_mib} MiB, {codec}",
        quantity=words,
        ours=series(own),
        peer=None if peer is None else series(peer),
        aim=aim,
        notes=tuple(tally.spending() for tally in (own, peer) if tally is not None),
        limit=memory_limit(setting.copy_bytes_per_s, vector_mib * MIB // 4, codec),
    )


def memory_limit(copy_bytes_per_s: float, elements: int, codec: str) -> str:
    """Return the physical limit on loopback in words: every sent byte is copied into the kernel and out of
    it, and no copy is faster than memory.
    """
    moved = 2 * (PEERS - 1) * elements * CODEC_BYTES[codec]
    return (
        f"{2 * moved / copy_bytes_per_s:.3f} s: {moved / 1e6:.0f} MB through the kernel, two copies at "
        f"{copy_bytes_per_s / 1e9:.1f} GB/s"
    )
