"""Grace periods: how long the start of a round waits for a peer that has not arrived yet.

The period follows from how late that peer was before (mean plus deviations, as in TCP's round-trip estimate).
Without it a group would either wait its whole window for every idle peer (hivemind: 5 to 15 s a round) or
start without a peer that is a moment late.

With `waiting_share_max`, waiting for one late peer costs at most that share of the time, on average, and
waiting for all together at most three times as much. Every peer has an account in seconds, and no search
waits for a peer longer than its account holds. Time pays its share into every account that is not full. A
wait is charged to the peers that were missing meanwhile, in equal parts: peers with long steps that come one
after the other share the cost, and the payments bound the sum of all waits. A peer that is late beyond that
is waited for only now and then, and at nobody else's expense: the accounts of punctual peers stay full. All
strangers to a run have one small account together, since an identity costs nothing.

The lateness here is that of a peer's arrival over many rounds;
`moe.client.logic.gathering` waits for one pass only, by the time that its own answers took, and keeps no
history, so that the two have nothing to share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.core.delays import DelayEstimate
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.core.presets import WAN

PEERS_MAX = 4096
_GAIN = 0.25  # weight of the newest observation in the running mean and deviation
# This many accounts are credited in full; above it they share the credit. With steps of at most a quarter of
# an epoch, waiting for peers of similar speed needs less
_ACCOUNTS_PAID_MAX = 3.0
# Fraction of one peer's credit that all strangers get together. Too small: newcomers that are late by a step
# miss more rounds; too large: free identities slow down the run
_STRANGERS_SHARE = 0.25
_ACCOUNT_PAYMENTS_MAX = 10.0  # a full account holds this many credits, so the average is over as many rounds


# added to the observed lateness, for noise of training steps and a starved processor. Too small: a punctual
# peer is left out
MARGIN_S = 2.5
GRACE_S_MAX = 10.0  # upper bound for every peer, however late it used to be
# Share of it for which a group waits for an unknown peer, if that is longer than the preset's time: in runs
# where long waits are worthwhile, peers also start late
UNKNOWN_PEER_SHARE = 1 / 6


@dataclass(slots=True)
class _Lateness:
    account_s: float  # seconds for which searches may wait for the peer
    usual: DelayEstimate | None = None  # estimate of its lateness; None: never seen
    misses: int = 0  # consecutive rounds that began without it while it was idle


class GracePeriod:
    """Estimates, for every peer, how long after this peer's own arrival it may still come.

    `unknown_peer_s`: grace of a peer that was never seen looking for a group. Too small: the first round of a
    run leaves slow starters out; too large: an idle peer delays it.
    """

    def __init__(
        self,
        grace_s_max: float = GRACE_S_MAX,
        *,
        unknown_peer_s: float = WAN.unknown_peer_s,
        waiting_share_max: float | None = None,
    ) -> None:
        """`waiting_share_max`: share of the time that waiting for one late peer may take on average; None:
        any. Too small: peers with long steps are left out of rounds. Raises UsageError when it is no share.
        """
        if waiting_share_max is not None and not 0.0 < waiting_share_max <= 1.0:
            raise UsageError(
                f"waiting_share_max is a share above 0 and at most 1, or None, not {waiting_share_max!r}"
            )
        self.grace_s_max, self._waiting_share_max = grace_s_max, waiting_share_max
        self._unknown_peer_s = max(unknown_peer_s, UNKNOWN_PEER_SHARE * grace_s_max)
        self._observed: OrderedDict[PeerId, _Lateness] = OrderedDict()
        self._strangers_s = self._unknown_peer_s  # the account of all strangers together
        self._paid_s: float | None = None  # time up to which accounts were credited

    def grace_s(self, peer_id: PeerId) -> float:
        """Return how long after this peer's own arrival `peer_id` may still come, in seconds. Each
        consecutive round that it missed while idle halves the period.
        """
        lateness = self._observed.get(peer_id)
        if lateness is None:
            return float(min(self._unknown_peer_s, self.grace_s_max))
        if lateness.usual is None:
            grace = self._unknown_peer_s
        else:
            grace = lateness.usual.rarely_exceeded_s + MARGIN_S
        grace = min(grace, self.grace_s_max) * 0.5**lateness.misses
        return float(grace if self._waiting_share_max is None else min(grace, lateness.account_s))

    def busy_grace_s(self, peer_id: PeerId) -> float:
        """Return how long after this peer's own arrival a peer that reports itself busy may still come, in
        seconds.
        """
        longest_s = 2 * self.grace_s_max
        if self._waiting_share_max is None:
            return longest_s
        lateness = self._observed.get(peer_id)
        return min(longest_s, self._unknown_peer_s if lateness is None else lateness.account_s)

    @property
    def strangers_s(self) -> float:
        """Return how long searches may wait for strangers to the run, in seconds."""
        return self._strangers_s if self._waiting_share_max is not None else math.inf

    def pay(self, now_s: float) -> None:
        """Pay the share of the time since the last call into each account. Without `waiting_share_max` this
        has no effect.
        """
        if self._waiting_share_max is None:
            return
        elapsed_s = now_s - self._paid_s if self._paid_s is not None else 0.0
        self._paid_s = now_s
        payment_s = elapsed_s * self._waiting_share_max
        full_s = max(self._unknown_peer_s, _ACCOUNT_PAYMENTS_MAX * payment_s)
        self._strangers_s = min(self._strangers_s + _STRANGERS_SHARE * payment_s, self._unknown_peer_s)
        owed = sorted(
            (full_s - one.account_s, number, one) for number, one in enumerate(self._observed.values())
        )
        rest_s = _ACCOUNTS_PAID_MAX * payment_s
        for place, (missing_s, _, one) in enumerate(owed):
            part_s = min(max(missing_s, 0.0), payment_s, rest_s / (len(owed) - place))
            one.account_s += part_s
            rest_s -= part_s

    def charge(self, missing_s: Mapping[PeerId, float], strangers: Collection[PeerId] = ()) -> None:
        """Charge a wait to the peers that were waited for. `missing_s`: how long each was missing since the
        search began, up to its arrival or to the beginning of the round. Nobody was waited for longer than
        its account allows: the rest was spent on others. Those of them that are `strangers` pay from their
        common account.
        """
        late = [max(missing_s[peer_id], 0.0) for peer_id in missing_s if peer_id in strangers]
        self._strangers_s -= min(max(late, default=0.0), self._strangers_s)
        waits = []
        for number, (peer_id, late_s) in enumerate(missing_s.items()):
            if peer_id in strangers:
                continue
            lateness = self._lateness_of(peer_id)
            waits.append((min(max(late_s, 0.0), lateness.account_s), number, lateness))
        charged_s = until_s = 0.0
        for place, (wait_s, _, lateness) in enumerate(sorted(waits)):
            charged_s += (wait_s - until_s) / (len(waits) - place)
            until_s = wait_s
            lateness.account_s -= charged_s

    def record_arrival(self, peer_id: PeerId, late_s: float) -> None:
        """Record that the peer began to look for a group `late_s` seconds after this peer did."""
        late_s = min(max(late_s, 0.0), self.grace_s_max)
        lateness = self._lateness_of(peer_id)
        lateness.misses = 0
        if lateness.usual is None:
            lateness.usual = DelayEstimate.of_first(late_s)
        else:
            lateness.usual.observe(late_s, _GAIN)

    def record_miss(self, peer_id: PeerId) -> None:
        """Record that a round began without this peer although it was idle."""
        lateness = self._lateness_of(peer_id)
        lateness.misses = min(lateness.misses + 1, 16)

    def record_cell_group(self, cell: PeerId, late_s: float, full: bool) -> None:
        """Record that a group of a grid cell began after `late_s` seconds. The cell is represented by the id
        of one peer in it; `full` tells whether all expected members had come.
        """
        if full:
            self.record_arrival(cell, late_s)
        else:
            self.record_miss(cell)

    def _lateness_of(self, peer_id: PeerId) -> _Lateness:
        lateness = self._observed.setdefault(peer_id, _Lateness(account_s=self._unknown_peer_s))
        self._observed.move_to_end(peer_id)
        while len(self._observed) > PEERS_MAX:
            self._observed.popitem(last=False)
        return lateness
