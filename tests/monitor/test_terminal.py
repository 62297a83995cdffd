"""The terminal view: it fits whatever it shows, and its keys work."""

from __future__ import annotations

import pytest

from swarm.cli.render.monitor import ScreenState, Trends, bar, render_screen
from swarm.monitor.logic.view import LinkView, RelayReport
from tests.monitor.watched_run import WatchedRun, peer, round_report


def busy(peers: int = 30, name: str = "volunteer with a long name") -> WatchedRun:
    watched = WatchedRun(peers, own={"accuracy": 0.5})
    for number in range(1, peers + 1):
        watched.present[peer(number)] = {
            "name": f"{name} {number:02}",
            "device": "cuda (NVIDIA GeForce RTX 4090)",
            "samples_per_s": 100.0 + number,
            "own": {"accuracy": 0.5},
            "bytes_up": 10**12,
            "drift": 1e-5,
        }
        watched.present[peer(number)]["rounds"] = (
            round_report(watched.now_s, reason="round", detail="x" * 160, group="ff"),
            round_report(watched.now_s),
        )
    watched.poll(2.0)
    return watched


def text(watched: WatchedRun, ui: ScreenState, columns: int = 80, rows: int = 24) -> str:
    lines = render_screen(watched.view(), ui, Trends([2.0, None, 1.0] * 30, [1.0] * 90), columns, rows)
    assert len(lines) <= rows
    assert all(line.cell_len <= columns for line in lines)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (80, 23), (60, 15), (200, 60)])
@pytest.mark.parametrize("section", ["rounds", "events", "experts", "relays"])
@pytest.mark.parametrize("details", [False, True])
def test_the_screen_fits_any_terminal(columns: int, rows: int, section: str, details: bool) -> None:
    text(busy(), ScreenState(section=section, details=details), columns, rows)
    text(WatchedRun(0), ScreenState(section=section, details=details), columns, rows)


def test_all_required_values_are_shown_in_80_by_24() -> None:
    seen = text(busy(name="oak"), ScreenState())
    for word in (
        "tiny@",
        "live",
        "30 peers",
        "epoch",
        "loss",
        "samples/s",
        "accuracy",
        "oak",
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


def test_columns_are_left_out_before_names_and_numbers_are_cut() -> None:
    """Before, names were cut at 13 columns, and numbers at the width of their heading."""
    watched = busy(name="a volunteer with such a long name")
    watched.present[peer(1)]["epoch"] = 12_345_678
    watched.poll(2.0)
    seen = text(watched, ScreenState(), columns=80)
    assert "a volunteer with such a long name 30" in seen
    assert "training" in seen
    assert "drift 1" not in seen.split("a volunteer")[1]
    wide = text(watched, ScreenState(), columns=200, rows=60)
    assert "12,345,678" in wide
    assert "…" not in wide.split("a volunteer")[1].splitlines()[0]


def test_old_values_are_marked_as_old() -> None:
    watched = busy()
    watched.now_s += 60.0
    late = text(watched, ScreenState())
    assert "LATE" in late
    assert "the values are old" in late
    watched.model.on_link(LinkView(status="lost", text="Trying 3 peers met before"), watched.now_s)
    assert "LOST" in text(watched, ScreenState())


def test_keys_choose_sort_and_open() -> None:
    watched, ui = busy(), ScreenState()
    assert text(watched, ui).count("›") == 1
    for _ in range(40):
        ui.key("down", 30)
    assert ui.chosen == 29
    ui.key("enter", 30)
    assert str(peer(1)) in text(watched, ui), "by pace the slowest comes last"
    ui.key("escape", 30)
    assert not ui.details
    ui.key("home", 30)
    ui.key("s", 30)
    assert "by name" in text(watched, ui)
    ui.key("tab", 30)
    assert "[events]" in text(watched, ui)
    ui.key("q", 30)
    assert ui.quit


@pytest.mark.parametrize(
    ("reach", "reached", "shown"),
    [
        ("relays abcdefgh and ijklmnop", None, "relay"),
        ("relay abcdefgh", False, "relay"),
        ("hidden", None, "out"),
        ("none", None, "out"),
        ("direct", None, "?"),
        ("direct", False, "no"),
        ("direct", True, "yes"),
        ("", None, "?"),
    ],
)
def test_the_column_says_how_a_peer_is_reached(reach: str, reached: bool | None, shown: str) -> None:
    watched = WatchedRun(1, reach=reach, name="anna")
    if reached is not None:
        watched.model.on_dialed(peer(1), reached)
    (line,) = [one for one in text(watched, ScreenState()).splitlines() if one.startswith("›anna")]
    assert shown in line.split()


def test_reports_of_relays_are_listed() -> None:
    watched = WatchedRun(1)
    ui = ScreenState(section="relays")
    assert "no relay has answered this monitor" in text(watched, ui)
    relay = RelayReport(
        peer_id=str(peer(9)),
        short=peer(9).short,
        age_s=40.0,
        reservations=3,
        circuits=2,
        carried_bytes=5_000_000,
        refused=7,
    )
    watched.poll(2.0, relays=(relay,))
    shown = text(watched, ui)
    assert f"{peer(9).short} 3 reservations, 2 circuits, 5.0 MB carried, 7 refused  40 s ago" in shown
    (listed,) = watched.view().as_dict()["relays"]
    assert (listed["peer_id"], listed["carried_bytes"], listed["refused"]) == (str(peer(9)), 5_000_000, 7)


def test_bars_have_their_width() -> None:
    for fraction in (-1.0, 0.0, 0.001, 0.5, 0.999, 1.0, 7.0):
        assert len(bar(fraction, 20)) == 20
    assert bar(1.0, 4) == "████"
    assert bar(0.0, 4) == "░░░░"
