"""Many experts, pipelines and long use on loopback, of swarm alone: a mixture over 256 experts, the
throughput of four stages compared with the ideal one, and the memory growth after 10,000 passes.
"""

from __future__ import annotations

import time

from benchmarks.allreduce import Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, Worker, written_bytes
from benchmarks.measured_systems import READY_TIMEOUT_S
from benchmarks.results import Aim, Row, Series

SERVERS = 4
SIDE = 16  # experts along each dimension of the grid
K_BEST = 4
BATCHES = (64, 512)
MIXTURE_STEPS = 12
WARM_UP = 3
OVERHEAD_S_MAX = 0.1  # limit for a step with a batch of 512, without the experts' own arithmetic

STAGES = 4
STAGE_S = 0.05  # forward time of a micro-batch in a stage; the backward pass takes as long
MICRO_BATCHES = 8
MICRO_BATCH_SIZE = 16
PIPELINE_BATCHES = 12
PIPELINE_READINGS = 3
IDEAL_MIN = 80.0  # per cent of the ideal throughput

PASSES = 10_000
# After these the answers that a server keeps for repeated requests have reached their limit (128 MiB).
PASSES_BEFORE = 10_000
PASS_BATCH = 16
GROWTH_MB_MAX = 8.0  # of server and caller together: 0.4 kB per pass and process

_WORKER = "benchmarks.workers.swarm_expert_grid"
_ORDER_TIMEOUT_S = 400.0


def mixtures(setting: Setting, kind: str) -> list[Row]:
    """Measure steps of a mixture over 256 experts: of no-ops, so that all of it is overhead, or of layers."""
    names = [[f"grid.{row}.{column}" for column in range(SIDE)] for row in range(SIDE)]
    share = SIDE // SERVERS
    configurations = [
        {
            "kind": kind,
            "experts": [name for row in names[server * share : (server + 1) * share] for name in row],
        }
        for server in range(SERVERS)
    ]
    with Launch("swarm", python=OWN_PYTHON, module=_WORKER, configurations=configurations) as launch:
        launch.receive("ready", READY_TIMEOUT_S)
        trainer = _added(launch)
        found = []
        for batch in BATCHES:
            trainer.send(
                {
                    "do": "mixture",
                    "kind": kind,
                    "grid": f"grid.[0:{SIDE}].[0:{SIDE}]",
                    "k_best": K_BEST,
                    "batch": batch,
                    "count": WARM_UP + MIXTURE_STEPS,
                }
            )
            done = trainer.receive("done", time.monotonic() + _ORDER_TIMEOUT_S)
            found.append(_mixture_row(kind, batch, done["seconds"][WARM_UP:], done["calls"]))
            setting.say(f"  256 experts ({kind}), batch {batch}: {found[-1].ours.median or 0:.3f} s a step")
    return found


def _mixture_row(kind: str, batch: int, seconds: list[float], calls: int) -> Row:
    is_bare = kind == "nop"
    return Row(
        identifier=f"experts-256-{kind}-{batch}",
        workload=(
            f"mixture layer, 256 experts {'that return their input' if is_bare else 'of width 256'} on "
            f"{SERVERS} servers, batch {batch}, k_best {K_BEST}"
        ),
        quantity="a step, forward and backward" + (": all of it beyond arithmetic" if is_bare else ""),
        ours=Series(name=f"swarm: 256 {kind}, {batch}", unit="s", samples=tuple(seconds)),
        peer=None,
        aim=Aim(of="ours", sense="at most", value=OVERHEAD_S_MAX)
        if is_bare and batch == BATCHES[-1]
        else None,
        limit="processor time: the trainer and four servers share the cores",
        notes=(
            f"{calls} experts are called in a pass; the trainer calls `gc.freeze()` after its imports, as "
            "docs/concepts/experts.md recommends",
        ),
    )


def pipeline(setting: Setting) -> Row:
    """Measure a pipeline of stages that take time but no processor, compared with the ideal, in which no
    stage ever waits.
    """
    configurations = [
        {"kind": "stage", "sample_s": STAGE_S / MICRO_BATCH_SIZE, "experts": [f"block.{stage}"]}
        for stage in range(STAGES)
    ]
    ideal_s = PIPELINE_BATCHES * MICRO_BATCHES * 2 * STAGE_S
    with Launch("swarm", python=OWN_PYTHON, module=_WORKER, configurations=configurations) as launch:
        launch.receive("ready", READY_TIMEOUT_S)
        trainer = _added(launch)
        samples, bubbles = [], []
        for _ in range(PIPELINE_READINGS):
            trainer.send(
                {
                    "do": "pipeline",
                    "blocks": f"block.[0:{STAGES}]",
                    "micro_batches": MICRO_BATCHES,
                    "micro_batch_size": MICRO_BATCH_SIZE,
                    "in_flight_max": 2 * STAGES,
                    "count": PIPELINE_BATCHES,
                    "at_s": time.monotonic(),
                }
            )
            done = trainer.receive("done", time.monotonic() + _ORDER_TIMEOUT_S)
            samples.append(100.0 * ideal_s / done["seconds"])
            bubbles.append(100.0 * done["bubbles"])
    setting.say(f"  pipeline: {samples} % of the ideal, bubbles {bubbles} %")
    return Row(
        identifier="experts-pipeline",
        workload=(
            f"pipeline of {STAGES} stages that take {STAGE_S * 1e3:.0f} ms a pass without a processor, "
            f"{PIPELINE_BATCHES} batches of {MICRO_BATCHES} micro-batches, 1F1B"
        ),
        quantity="throughput, per cent of that of stages that never wait",
        ours=Series(name="swarm: pipeline", unit="%", samples=tuple(samples)),
        peer=None,
        aim=Aim(of="ours", sense="at least", value=IDEAL_MIN),
        limit="filling and emptying the pipeline once: 3 of 99 micro-batch times",
        notes=(f"bubbles as reported: {sorted(bubbles)[len(bubbles) // 2]:.0f} %",),
    )


def memory(setting: Setting) -> Row:
    """Measure how much the memory of server and caller grows in 10,000 passes, after as many others."""
    with Launch(
        "swarm",
        python=OWN_PYTHON,
        module=_WORKER,
        configurations=[{"kind": "ffn", "experts": ["ffn.0"]}],
    ) as launch:
        launch.receive("ready", READY_TIMEOUT_S)
        caller = _added(launch)
        held = []
        for count in (PASSES_BEFORE, PASSES):
            caller.send({"do": "calls", "expert": "ffn.0", "batch": PASS_BATCH, "count": count})
            caller.receive("done", time.monotonic() + _ORDER_TIMEOUT_S)
            held.append(written_bytes(launch.processes()))
    grown = (held[1] - held[0]) / 1e6
    setting.say(f"  {PASSES} passes: {held[0] / 1e6:.0f} MB, then {grown:+.1f} MB")
    return Row(
        identifier="experts-memory",
        workload=f"{PASSES:,} forward and backward passes of one expert, after {PASSES_BEFORE:,} others",
        quantity="growth of server and caller together",
        ours=Series(name="swarm: growth", unit="MB", samples=(grown,)),
        peer=None,
        aim=Aim(of="ours", sense="at most", value=GROWTH_MB_MAX),
        limit="nothing: inputs and answers are kept within bounds",
        notes=(f"they take {held[0] / 1e6:.0f} MB before",),
    )


def _added(launch: Launch) -> Worker:
    trainer = launch.add({}, _WORKER)
    trainer.receive("ready", time.monotonic() + READY_TIMEOUT_S)
    return trainer
