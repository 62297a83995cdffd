"""The short form, which checks that the benchmarks run and that results are right.

It takes small sizes, swarm and the bare transport only, and has no thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import attacks, group_formation, reach, transports
from benchmarks.allreduce import PEERS, Setting, ours, reduction
from benchmarks.interleaving import Plan, interleave
from benchmarks.measured_systems import Bare, MeasuredSystem, Workload
from benchmarks.results import Row

VECTOR_MIB = 4
CODECS = ("float32", "float16", "bfloat16")


def rows(say: Callable[[str], None]) -> list[Row]:
    # 3 more elements give shards of unequal sizes
    """Measure the short form and return its rows."""
    workloads = [Workload(elements=VECTOR_MIB * (1 << 18) + 3, tensors=5, codec=codec) for codec in CODECS]
    say(f"all-reduce, {PEERS} × {VECTOR_MIB} MiB: swarm {', '.join(CODECS)}, bare transport")
    makers: list[Callable[[], MeasuredSystem]] = [
        *(partial(ours, workload) for workload in workloads),
        partial(Bare, workloads[0]),
    ]
    *own, bare = interleave(
        makers, [*(f"swarm {codec}" for codec in CODECS), Bare.name], Plan(passes=1, rounds=2), say
    )
    found = [
        Row(
            identifier=f"allreduce-{VECTOR_MIB}-{codec}-quick",
            workload=f"all-reduce, {PEERS} peers × {VECTOR_MIB} MiB, {codec}",
            quantity="all-reduce alone",
            ours=tally.series("all-reduce", reduction),
            peer=bare.series("all-reduce", reduction) if codec == "float32" else None,
            aim=None,
            shown="ours / peer",
        )
        for codec, tally in zip(CODECS, own, strict=True)
    ]
    setting = Setting(plan=Plan(passes=1, rounds=2), hivemind=None, copy_bytes_per_s=1.0, say=say)
    crowds = attacks.rows(say, attacks.QUICK_CROWDS)
    moved = transports.rows(say, size_mib=16, turns=1)
    return [*found, *moved, group_formation.short(setting, rounds=3), *crowds, *reach.short(say)]
