"""The blocklist of a run: bans hold until they are replaced, lies are forgiven after a while."""

from __future__ import annotations

import pytest

from averaging.blocklist import BLOCK_AFTER_LIE_S, PeerBlocklist
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId

OWN, ONE, TWO = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


class FixedClock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def swarm_s(self) -> float:
        return self.now_s


def test_a_ban_replaces_earlier_ones_and_tells_whether_this_peer_is_banned() -> None:
    blocklist = PeerBlocklist(OWN, FixedClock())
    blocklist.ban([ONE, OWN])
    own_before = blocklist.own_is_banned
    assert blocklist.banned == {ONE}
    with pytest.raises(PeerError, match="banned"):
        blocklist.check_not_banned(ONE)
    blocklist.ban([TWO])
    assert (own_before, blocklist.own_is_banned) == (True, False)
    blocklist.check_not_banned(ONE)
    assert blocklist.reason(TWO) is not None


def test_a_peer_that_lied_is_in_no_group_for_a_while_but_is_not_banned() -> None:
    clock = FixedClock()
    blocklist = PeerBlocklist(OWN, clock)
    blocklist.block(ONE, "it lied")
    with pytest.raises(PeerError, match="it lied"):
        blocklist.check(ONE)
    blocklist.check_not_banned(ONE)
    clock.now_s += BLOCK_AFTER_LIE_S
    blocklist.check(ONE)
