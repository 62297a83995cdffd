"""A search for a group that closes an epoch ends when it cannot succeed any more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.optim.closing import EpochCloser
from averaging.optim.progress.logic.reports import ProgressReport
from averaging.result import RoundResult
from swarm.core.ids import PeerId
from swarm.testing.identities import SeededIdentity

HEAD, OTHER_HEAD = b"h" * 32, b"o" * 32
OTHER = SeededIdentity(2).peer_id


class History:
    """A history of whose electors this peer alone is a quorum."""

    ahead, is_break, grid_rounds, has_begun, may_commit_alone = None, False, 1, True, True
    root = SimpleNamespace(electors=(SeededIdentity(1).peer_id, OTHER))

    def seek_quorum(self, *_: Any) -> bool:
        return True

    def leave(self, proposal: None) -> bool:
        return True

    def quorum_text(self) -> str:
        return "this peer waits for its electors"

    def is_new(self, peer: PeerId, head: bytes) -> bool:
        return False


def report(head: bytes) -> ProgressReport:
    return ProgressReport(epoch=3, samples=0, rate=1.0, at_s=0.0, since_s=0.0, head=head)


class Times:
    """A clock that stands still, and the times at which the other peers were asked for their reports."""

    def __init__(self) -> None:
        self.now_s, self.probes_s = 100.0, list[float]()
        self.clock = SimpleNamespace(monotonic_s=lambda: self.now_s)

    def probe_soon(self) -> None:
        self.probes_s.append(self.now_s)


def closer(
    head: bytes, *, in_round: bool = False, catch_up: Any = None, averager: Any = None, history: Any = None
) -> EpochCloser:
    """Return what closes epochs while another peer reports this head."""
    others = {OTHER: report(head)}
    tracker = SimpleNamespace(
        history=history or History(),
        others=lambda: others,
        others_at_head=lambda: {peer: one for peer, one in others.items() if one.head == HEAD},
        voters=list,
        refresh_age_s=lambda: 0.0,
        on_round=lambda peers: None,
        announce_full=lambda epoch: None,
    )
    mode: Any = SimpleNamespace(
        state=SimpleNamespace(epoch=3),
        traits=SimpleNamespace(canonical=True, proceeds_alone=False, keeps_progress=False),
        failed=lambda reason: None,
    )
    averager = averager or SimpleNamespace(in_round=in_round, in_state_round=False)
    donor: Any = SimpleNamespace(changed=lambda: None)
    any_tracker: Any = tracker
    return EpochCloser(mode, any_tracker, donor, averager, catch_up or Times(), load_timeout_s=60.0)


@pytest.mark.parametrize(
    ("head", "in_round", "is_over"),
    [(HEAD, False, False), (OTHER_HEAD, False, True), (OTHER_HEAD, True, False)],
)
def test_a_search_is_over_when_the_others_have_continued_with_another_history(
    head: bytes, in_round: bool, is_over: bool
) -> None:
    """Regression test: a peer that is a quorum by itself searched for the others, which had continued with a
    break while it loaded the state, until the search's time limit. The others followed that break meanwhile.
    """
    closing = closer(head, in_round=in_round)
    assert closing.is_obsolete() is is_over
    assert closing.is_left_alone() is (head != HEAD)


def test_a_long_search_asks_the_others_for_their_reports_with_growing_pauses() -> None:
    """Regression test: a peer that was killed right after its last report counted as present until that
    report had expired, and the grace began then.
    """
    times: Any = Times()
    closing = closer(HEAD, in_round=False, catch_up=times)
    for tick in range(31):
        times.now_s = 100.0 + tick
        assert not closing.is_obsolete()
    assert times.probes_s == [102.0, 106.0, 114.0, 130.0]
    times.now_s = 200.0  # another search
    assert not closing.is_obsolete()
    times.now_s = 201.0
    assert not closing.is_obsolete()
    assert times.probes_s[-1] == 130.0


def test_no_report_is_asked_for_during_a_round() -> None:
    times: Any = Times()
    closing = closer(HEAD, in_round=True, catch_up=times)
    for tick in range(31):
        times.now_s = 100.0 + tick
        assert not closing.is_obsolete()
    assert not times.probes_s


@pytest.mark.parametrize(
    ("before", "now", "is_held"), [(1, 8, True), (1, 9, False), (16, 32, False), (17, 32, True)]
)
def test_no_state_is_averaged_where_most_of_a_large_group_have_just_loaded_it(
    before: int, now: int, is_held: bool
) -> None:
    """The round over the state took 11 of 20 s of 33 peers on two cores, of which 32 had just come."""
    held, result = list[int](), SimpleNamespace(failed=False, peers=(), left_out=())

    def average_state(is_obsolete: Callable[[], bool]) -> Any:
        held.append(now)
        return SimpleNamespace(result=result)

    averager = SimpleNamespace(state_sync_epochs=3, open_state=lambda: None, average_state=average_state)
    history = SimpleNamespace(past=lambda: SimpleNamespace(contributors=lambda epochs: (now, before)))
    closing = closer(HEAD, averager=averager, history=history)
    assert (closing.average_state_if_due(alone=False) is not None) is is_held
    assert bool(held) is is_held


@pytest.mark.parametrize("unresolved", [False, True])
@pytest.mark.parametrize("grid_rounds", [1, 2])
def test_samples_may_be_counted_after_a_round_of_a_cell_that_others_may_have_committed(
    grid_rounds: int, unresolved: bool
) -> None:
    """In one group the certificate of the round names those whose values are in its average."""

    class Behind(History):
        ahead = SimpleNamespace()

    history, catch_up = Behind(), Times()
    history.grid_rounds = grid_rounds
    catch_up.probe = lambda timeout_s: None  # type: ignore[attr-defined]
    closing = closer(HEAD, history=history, catch_up=catch_up)
    outcome = closing.failed(RoundResult(failed=True, reason="round", unresolved=unresolved), 1)
    assert outcome is not None
    assert outcome.behind
    assert closing.has_lost_round is (unresolved and grid_rounds > 1)


def test_samples_may_be_counted_where_a_later_attempt_learns_that_the_others_have_continued() -> None:
    history, catch_up = History(), Times()
    history.grid_rounds = 2
    catch_up.probe = lambda timeout_s: None  # type: ignore[attr-defined]
    closing = closer(HEAD, history=history, catch_up=catch_up)
    assert closing.failed(RoundResult(failed=True, reason="round", unresolved=True), 1) is None
    outcome = closing.failed(RoundResult(failed=True, reason="passed"), 2)
    assert outcome is not None
    assert outcome.behind
    assert closing.has_lost_round


def test_the_next_attempt_knows_that_others_may_have_committed_the_last_one() -> None:
    begun, history, catch_up = list[bool](), History(), Times()
    history.grid_rounds = 2
    catch_up.probe = lambda timeout_s: None  # type: ignore[attr-defined]

    def average(epoch: int, is_obsolete: Any, grace_s: float, *, may_have_counted: bool) -> RoundResult:
        begun.append(may_have_counted)
        return RoundResult(failed=True, reason="round", unresolved=len(begun) == 1)

    closing = closer(HEAD, history=history, catch_up=catch_up, averager=SimpleNamespace(average=average))
    assert not closing.run_rounds(again=False).stepped
    assert begun == [False, True, True]


def test_a_peer_whose_quorum_has_gone_meanwhile_does_not_step_alone() -> None:
    """Another peer may say goodbye after a quorum was found with it and before it is known that a round has
    nobody to begin with. The step would be a break without any grace.
    """
    history = History()
    history.may_commit_alone = False
    closing = closer(OTHER_HEAD, history=history)
    outcome = closing.run_rounds(again=False)
    assert not outcome.stepped
    assert outcome.reason == history.quorum_text()


@pytest.mark.parametrize("fails", ["the step", "the scheduler", ""])
def test_round_is_lost_when_its_step_fails_and_not_when_the_scheduler_does(fails: str) -> None:
    """Others have the round's certificate: the samples of a peer that did not make its step are in their
    state already.
    """
    epochs, times = list[int](), Times()
    state = SimpleNamespace(epoch=3)

    def advance(apply: Callable[[], None]) -> None:
        apply()
        if fails == "the step":
            raise RuntimeError(fails)
        state.epoch += 1
        if fails:
            raise RuntimeError(fails)

    mode: Any = SimpleNamespace(
        state=state,
        traits=SimpleNamespace(proceeds_alone=False),
        apply=lambda metadata: None,
    )
    tracker: Any = SimpleNamespace(
        history=None, own=OTHER, begin_epoch=lambda epoch, **options: epochs.append(epoch)
    )
    others: Any = SimpleNamespace(changed=lambda: None, clock=times.clock, advance=advance)
    closing = EpochCloser(mode, tracker, others, others, others, load_timeout_s=60.0)
    result: Any = SimpleNamespace(certificate=None, gathered={}, peers=(), left_out={}, contributions={})
    if fails:
        with pytest.raises(RuntimeError, match=fails):
            closing.committed(result, 0)
    else:
        assert closing.committed(result, 0).stepped
    assert closing.has_lost_round is (fails == "the step")
    assert epochs == [4] * (fails != "the step")
