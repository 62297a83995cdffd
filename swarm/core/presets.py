"""The times that depend on the links between the peers, in three presets: `local`, `lan` and `wan`.

A user names a preset (`swarm.NodeConfig(preset="lan")`); the node and every service on it take their times
from it. They are starting values, for as long as nothing was measured, and bounds of what is measured. Peers
with different presets can train together: each applies its own times to the others.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from swarm.core.errors import UsageError

Preset: TypeAlias = Literal["local", "lan", "wan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The times that a preset sets, in seconds. Too small: peers that are well count as failed. Too large:
    everybody waits for peers that have failed.
    """

    dial_timeout_s: float  # limit for connecting, even if the call itself may take longer
    hello_timeout_s: float  # a bootstrap peer must have answered by then, connecting included
    rejoin_first_s: float  # pause after an attempt to join that nobody answered; doubled each time
    rejoin_s_max: float  # longest of these pauses
    reintroduce_s: float  # between two greetings of the bootstrap peers by a peer that has joined

    dht_call_timeout_s: float  # a dead peer costs a background task this long
    # a search continues without a peer that is silent this long, and counts a failure of it
    dht_stall_s: float
    dht_search_timeout_s: float  # a search that no reader waits for any more ends after this time

    query_timeout_s: float  # a peer that does not answer a query for this long counts as gone
    unknown_peer_s: float  # how long a group waits for a peer whose lateness is not known yet
    records_timeout_s: float  # for reading the presence records

    progress_refresh_s_max: float  # between two reads of the others' progress
    no_donor_wait_s: float  # in epoch 0: how long to look for a state before concluding that there is none
    metrics_every_s: float  # interval at which a peer of a small run publishes its metrics


WAN = Timings(
    dial_timeout_s=10.0,
    hello_timeout_s=5.0,
    rejoin_first_s=0.5,
    rejoin_s_max=30.0,
    reintroduce_s=60.0,
    dht_call_timeout_s=3.0,
    dht_stall_s=1.0,
    dht_search_timeout_s=10.0,
    query_timeout_s=1.0,
    unknown_peer_s=3.0,
    records_timeout_s=5.0,
    progress_refresh_s_max=3.0,
    no_donor_wait_s=3.0,
    metrics_every_s=2.0,
)
LAN = Timings(
    dial_timeout_s=5.0,
    hello_timeout_s=3.0,
    rejoin_first_s=0.25,
    rejoin_s_max=10.0,
    reintroduce_s=20.0,
    dht_call_timeout_s=2.0,
    dht_stall_s=0.5,
    dht_search_timeout_s=5.0,
    query_timeout_s=0.5,
    unknown_peer_s=2.0,
    records_timeout_s=2.5,
    progress_refresh_s_max=1.0,
    no_donor_wait_s=1.0,
    metrics_every_s=1.0,
)
# Delays are nothing, but the peers share the processors of one machine: what covers a starved processor is as
# long as on the internet. Only intervals, and waiting for peers that may not exist, are shorter.
LOCAL = replace(
    WAN,
    rejoin_first_s=0.1,
    rejoin_s_max=1.0,
    reintroduce_s=2.0,
    unknown_peer_s=1.5,
    progress_refresh_s_max=0.5,
    no_donor_wait_s=0.5,
    metrics_every_s=0.5,
)
_PRESETS: dict[str, Timings] = {"local": LOCAL, "lan": LAN, "wan": WAN}


def timings_of(preset: Preset) -> Timings:
    """Return the times of a preset. Raises UsageError for a name that is none."""
    if preset not in _PRESETS:
        raise UsageError(f"preset is one of {', '.join(typing.get_args(Preset))}, not {preset!r:.60}")
    return _PRESETS[preset]
