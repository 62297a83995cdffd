"""The terminal view: whatever is in it, it fits, and keys do what they say."""

from __future__ import annotations

import pytest

from swarm.cli.render.monitor import ScreenState, Trends, bar, render_screen
from swarm.monitor.logic.view import LinkView
from tests.monitor.telling import Watching, peer, told


def busy(peers: int = 30) -> Watching:
    watching = Watching(peers, own={"accuracy": 0.5})
    for number in range(1, peers + 1):
        watching.present[peer(number)] = {
            "name": f"volunteer with a long name {number:02}",
            "device": "cuda (NVIDIA GeForce RTX 4090)",
            "samples_per_s": 100.0 + number,
            "own": {"accuracy": 0.5},
            "bytes_up": 10**12,
            "drift": 1e-5,
        }
        watching.present[peer(number)]["rounds"] = (
            told(watching.now_s, reason="round", detail="x" * 160, group="ff"),
            told(watching.now_s),
        )
    watching.look(2.0)
    return watching


def text(watching: Watching, state: ScreenState, columns: int = 80, rows: int = 24) -> str:
    lines = render_screen(watching.view(), state, Trends([2.0, None, 1.0] * 30, [1.0] * 90), columns, rows)
    assert len(lines) <= rows
    assert all(line.cell_len <= columns for line in lines)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (80, 23), (60, 15), (200, 60)])
@pytest.mark.parametrize("section", ["rounds", "events", "experts"])
@pytest.mark.parametrize("details", [False, True])
def test_it_fits(columns: int, rows: int, section: str, details: bool) -> None:
    text(busy(), ScreenState(section=section, details=details), columns, rows)
    text(Watching(0), ScreenState(section=section, details=details), columns, rows)


def test_what_the_issue_lists_is_there_in_80_by_24() -> None:
    seen = text(busy(), ScreenState())
    for word in (
        "tiny@",
        "live",
        "30 peers",
        "epoch",
        "loss",
        "samples/s",
        "accuracy",
        "volunteer",
        "cuda",
        "training",
        "gave",
        "sent",
        "got",
        "drift",
        "reach",
        "failed:",
    ):
        assert word in seen, word


def test_old_numbers_are_called_old() -> None:
    watching = busy()
    watching.now_s += 60.0
    late = text(watching, ScreenState())
    assert "LATE" in late
    assert "what is shown is old" in late
    watching.model.on_link(LinkView(status="lost", text="Knocking at 3 peers met before"), watching.now_s)
    assert "LOST" in text(watching, ScreenState())


def test_keys_choose_sort_and_open() -> None:
    watching, state = busy(), ScreenState()
    assert text(watching, state).count("›") == 1
    for _ in range(40):
        state.key("down", 30)
    assert state.chosen == 29
    state.key("enter", 30)
    assert str(peer(1)) in text(watching, state), "by pace the slowest comes last"
    state.key("escape", 30)
    assert not state.details
    state.key("home", 30)
    state.key("s", 30)
    assert "by name" in text(watching, state)
    state.key("tab", 30)
    assert "[events]" in text(watching, state)
    state.key("q", 30)
    assert state.quit


def test_bars_have_their_width() -> None:
    for fraction in (-1.0, 0.0, 0.001, 0.5, 0.999, 1.0, 7.0):
        assert len(bar(fraction, 20)) == 20
    assert bar(1.0, 4) == "████"
    assert bar(0.0, 4) == "░░░░"
