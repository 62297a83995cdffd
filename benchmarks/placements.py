"""Servers that place themselves in a pipeline, in simulation: the throughput while servers fail and others
join, and the time until a stage that has lost all its servers has one again.

The plan of production runs in virtual seconds (`swarm.testing.placed_pipeline`), so figures are the same on
every machine.
"""

from __future__ import annotations

from benchmarks.allreduce import Setting
from benchmarks.results import Aim, Row, Series
from moe.protocol.names import ExpertUid
from swarm.testing.placed_pipeline import PlacedPipeline

STAGES = [ExpertUid.parse(f"block.{number}") for number in range(4)]
SEEDS = 6
SERVERS, SMALL = 16, 8
HOURS, DEPARTURES_EVERY_S = 4, 600.0
BEST_MIN = 90.0  # per cent of the throughput of the best placement
SERVED_S_MAX = 120.0
_BEFORE_S = 60


def rows(setting: Setting) -> list[Row]:
    """Simulate both, with several seeds each."""
    shares, served_s, moves = list[float](), list[float](), list[float]()
    for seed in range(SEEDS):
        pipeline = PlacedPipeline(seed, SERVERS, STAGES)
        pipeline.run_with_departures(HOURS * 3600, DEPARTURES_EVERY_S)
        shares.append(100.0 * pipeline.computed / pipeline.possible)
        moves.append(sum(len(one.moves_s) for one in pipeline.servers))
        pipeline = PlacedPipeline(seed, SMALL, STAGES)
        for _ in range(_BEFORE_S):
            pipeline.second()
        served_s.append(pipeline.lose(STAGES[1]))
    setting.say(
        f"  placement: {min(shares):.1f} % of the best, a lost stage is back in {max(served_s):.0f} s"
    )
    return [
        Row(
            identifier="experts-placement",
            workload=(
                f"simulated pipeline of {len(STAGES)} stages on {SERVERS} servers, of which one fails every "
                f"{DEPARTURES_EVERY_S / 60:.0f} minutes while another one joins, {HOURS} hours"
            ),
            quantity="throughput, per cent of that of the best placement of the same servers",
            ours=Series(name="swarm: placement", unit="%", samples=tuple(shares)),
            peer=None,
            aim=Aim(of="ours", sense="at least", value=BEST_MIN),
            limit="a dead server is found until its declaration expires, after 45 s",
            notes=(f"servers that stayed until the end have moved {max(moves):.0f} times at most, together",),
        ),
        Row(
            identifier="experts-lost-stage",
            workload=f"simulated pipeline of {len(STAGES)} stages on {SMALL} servers: one stage loses all",
            quantity="until the stage has a server again",
            ours=Series(name="swarm: lost stage", unit="s", samples=tuple(served_s)),
            peer=None,
            aim=Aim(of="ours", sense="at most", value=SERVED_S_MAX),
            limit="45 s until declarations expire, 15 s until they are read, 20 s in which the plan stands",
        ),
    ]
