"""The arithmetic of the benchmarks: medians, ratios, aims, judged rounds, interleaving, reference vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.allreduce import memory_limit
from benchmarks.interleaving import FAILED_ROUNDS_MAX, LAUNCHES_MAX, Plan, interleave
from benchmarks.launch import LaunchFailed
from benchmarks.measured_systems import Round, judge
from benchmarks.reference_vectors import TOLERANCE, delivered, fill, tensors_of
from benchmarks.results import Aim, Row, Series, ratio
from swarm.compression import find


def series(*samples: float) -> Series:
    return Series(name="one", unit="s", samples=samples)


def test_a_median_ignores_the_outlier_and_needs_a_sample() -> None:
    assert series(1.0, 9.0, 2.0).median == 2.0
    assert series(1.0, 2.0).median == 1.5
    assert series().median is None


def test_a_ratio_follows_its_direction_and_needs_positive_values() -> None:
    assert ratio(0.5, 2.0, "peer / ours") == 4.0
    assert ratio(0.5, 2.0, "ours / peer") == 0.25
    assert ratio(None, 2.0, "peer / ours") is None
    assert ratio(0.0, 2.0, "peer / ours") is None
    assert ratio(0.5, -0.2, "peer / ours") is None  # a time saved has no ratio to a time lost


@pytest.mark.parametrize(
    ("aim", "ours", "peer", "met"),
    [
        (Aim(of="peer / ours", sense="at least", value=4.0), 0.5, 2.0, True),
        (Aim(of="peer / ours", sense="at least", value=4.0), 0.6, 2.0, False),
        (Aim(of="ours / peer", sense="at most", value=1.5), 1.5, 1.0, True),
        (Aim(of="ours", sense="at most", value=0.5), 0.4, None, True),
        (Aim(of="ours", sense="at most", value=0.5), None, None, None),
        (Aim(of="peer / ours", sense="at least", value=4.0), 0.5, None, None),
    ],
)
def test_an_aim_is_met_missed_or_not_measured(
    aim: Aim, ours: float | None, peer: float | None, met: bool | None
) -> None:
    assert aim.met(ours, peer) is met


def test_a_row_shows_the_ratio_its_aim_is_about() -> None:
    row = Row(
        identifier="x",
        workload="",
        quantity="",
        ours=series(3.0),
        peer=series(2.0),
        aim=Aim(of="ours / peer", sense="at most", value=1.5),
    )
    assert row.ratio_kind == "ours / peer"
    assert row.ratio == 1.5
    assert row.met is True
    assert Row(identifier="x", workload="", quantity="", ours=series(3.0), peer=None, aim=None).ratio is None


def reports(**changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    done = [
        {
            "ok": True,
            "reason": "",
            "end_s": 11.0 + rank / 10,
            "grouped_s": 10.2 + rank / 10,
            "group": 2,
            "digest": "d",
            **changes,
        }
        for rank in range(2)
    ]
    return done, [{"delivered": 1.0, "worst": 0.0}, {"delivered": 1.0, "worst": 0.0}]


def test_a_round_lasts_until_its_slowest_peer() -> None:
    done, checked = reports()
    outcome = judge(done, checked, at_s=10.0, peers=2, processor_s=1.0)
    assert outcome.ok
    assert outcome.whole_s == pytest.approx(1.1)
    assert outcome.group_s == pytest.approx(0.3)
    assert outcome.reduce_s == pytest.approx(0.8)


def test_a_round_of_fewer_peers_is_a_failure() -> None:
    done, checked = reports(group=1)
    assert "groups of [1]" in judge(done, checked, at_s=10.0, peers=2, processor_s=0.0).reason


def test_a_partly_averaged_vector_is_a_failure() -> None:
    done, checked = reports()
    checked[1]["delivered"] = 0.25
    outcome = judge(done, checked, at_s=10.0, peers=2, processor_s=0.0)
    assert not outcome.ok
    assert outcome.wrong
    assert outcome.reason == "25.0% of the elements hold the average"


def test_different_results_on_two_peers_are_a_failure() -> None:
    done, checked = reports()
    done[1]["digest"] = "other"
    assert "different" in judge(done, checked, at_s=10.0, peers=2, processor_s=0.0).reason


def _travelled(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    found = find(codec)
    payload = found.encode(tensor, torch.empty(found.encoded_bytes(tensor.numel()), dtype=torch.uint8))
    return found.decode(payload, torch.empty(tensor.numel())).clone()


@pytest.mark.parametrize("codec", sorted(TOLERANCE))
def test_reference_vectors_distinguish_an_average_from_the_initial_values(codec: str) -> None:
    peers, elements = 4, (1 << 20) * 2 + 17
    mean = tensors_of(elements, 3)
    assert sum(tensor.numel() for tensor in mean) == elements
    fill(mean, (peers - 1) / 2)
    assert delivered([_travelled(tensor, codec) for tensor in mean], peers, codec)[0] == 1.0
    for rank in (0, peers - 1):
        own = tensors_of(elements, 3)
        fill(own, rank)
        assert delivered(own, peers, codec)[0] == 0.0
        assert delivered([mean[0], *own[1:]], peers, codec)[0] == mean[0].numel() / elements
        of_three = tensors_of(elements, 3)
        fill(of_three, (peers * (peers - 1) / 2 - rank) / (peers - 1))
        assert delivered([mean[0], *of_three[1:]], peers, codec)[0] == mean[0].numel() / elements
        assert delivered([mean[0], *of_three[1:]], peers, codec, lost=rank)[0] == 1.0


def test_the_memory_limit_counts_two_copies_of_all_sent_bytes() -> None:
    assert memory_limit(1e9, 1_000_000, "float32").startswith("0.048 s: 24 MB")
    assert memory_limit(1e9, 1_000_000, "float16").startswith("0.024 s: 12 MB")


class Scripted:
    """A system that follows a script of seconds, failure reasons and exceptions."""

    def __init__(self, name: str, script: Sequence[float | str | LaunchFailed], journal: list[str]) -> None:
        self.name, self._script, self._journal = name, list(script), journal

    def __enter__(self) -> Scripted:
        self._journal.append(f"open {self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.append(f"close {self.name}")

    def round(self) -> Round:
        step = self._script.pop(0)
        self._journal.append(self.name)
        if isinstance(step, LaunchFailed):
            raise step
        return (
            Round(ok=False, reason=step)
            if isinstance(step, str)
            else Round(ok=True, whole_s=step, processor_s=step)
        )


def test_systems_take_turns_and_the_warm_up_is_dropped() -> None:
    journal: list[str] = []
    makers = [
        lambda: Scripted("a", [9.0, 1.0, 2.0], journal),
        lambda: Scripted("b", [9.0, 3.0, 4.0], journal),
    ]
    first, second = interleave(makers, ["a", "b"], Plan(passes=2, rounds=2), lambda _text: None)
    assert first.series("", lambda outcome: outcome.whole_s).samples == (1.0, 2.0, 1.0, 2.0)
    assert second.series("", lambda outcome: outcome.whole_s).samples == (3.0, 4.0, 3.0, 4.0)
    assert journal[:10] == ["open a", "a", "open b", "b", "a", "b", "a", "b", "close b", "close a"]
    assert journal[10] == "open b"  # the other order in the second pass
    assert first.spending() == "a: 1.50 processor seconds a round"


def test_failed_rounds_are_counted_and_repeated_up_to_a_limit() -> None:
    (tally,) = interleave(
        [lambda: Scripted("a", [9.0, "no group", 1.0], [])],
        ["a"],
        Plan(passes=1, rounds=1),
        lambda _text: None,
    )
    assert (len(tally.rounds), tally.failed, tally.reasons) == (1, 1, ["no group"])
    (tally,) = interleave(
        [lambda: Scripted("a", [9.0] + ["no"] * 9, [])], ["a"], Plan(passes=1, rounds=1), lambda _text: None
    )
    assert (len(tally.rounds), tally.failed) == (0, FAILED_ROUNDS_MAX)


def test_a_failed_launch_is_closed_counted_and_repeated_up_to_a_limit() -> None:
    journal: list[str] = []
    scripts: list[list[float | str | LaunchFailed]] = [[LaunchFailed("hung")], [9.0, 1.0]]
    (tally,) = interleave(
        [lambda: Scripted("a", scripts.pop(0), journal)], ["a"], Plan(passes=1, rounds=1), lambda _text: None
    )
    assert (len(tally.rounds), tally.launches_failed) == (1, 1)
    assert journal == ["open a", "a", "close a", "open a", "a", "a", "close a"]
    (tally,) = interleave(
        [lambda: Scripted("a", [LaunchFailed("hung")], [])],
        ["a"],
        Plan(passes=1, rounds=1),
        lambda _text: None,
    )
    assert (len(tally.rounds), tally.launches_failed, tally.reasons) == (0, LAUNCHES_MAX, ["hung"])
