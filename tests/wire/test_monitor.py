"""`swarm monitor` on a real run: its JSON for scripts, its files on disk, and its Prometheus metrics."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from averaging.optim.exchange import fetch_history
from swarm.cli import main
from swarm.core.ids import Contact
from swarm.metrics.record import metrics_keys
from swarm.monitor.prometheus import MetricsServer
from swarm.monitor.watching import Watch, WatchConfig
from swarm.node import Node
from swarm.run import contributors
from tests.wire.watched_run import NAME, watched_run

_WAIT_S = 20.0


@pytest.fixture(scope="module")
def run() -> Iterator[list[Node]]:
    with watched_run() as nodes:
        yield nodes


def until(seen: Any, what: str) -> Any:
    deadline_s = time.monotonic() + _WAIT_S
    while not (found := seen()):
        assert time.monotonic() < deadline_s, f"{what} did not come within {_WAIT_S:.0f} s"
        time.sleep(0.05)
    return found


def wait_for_metrics(run: list[Node]) -> None:
    """Wait until both trainers have published metrics with a round."""

    def everybody() -> bool:
        answers = run[0].dht.get_many(metrics_keys(run_id()), max_age_s=0).answers
        entries = [entry for found in answers.values() if isinstance(found, dict) for entry in found.values()]
        return len(entries) == 2 and all(
            entry.value.get("rounds") and "loss" in entry.value for entry in entries
        )

    until(everybody, "metrics with a round")


def run_id() -> str:
    from swarm.core.ids import open_run_id

    return open_run_id(NAME)


def test_once_json_is_one_line_that_holds_the_run(
    run: list[Node], capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_metrics(run)
    assert main(["monitor", run[0].addresses[0], "--run", NAME, "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.strip().splitlines()
    view = json.loads(line)
    assert (view["event"], view["link"]["status"], view["run"]["name"]) == ("view", "live", NAME)
    assert {peer["name"] for peer in view["peers"]} == {"anna", "ben"}
    assert all(
        peer["fresh"] and peer["device"] == "cpu" and peer["reach"] == "direct" for peer in view["peers"]
    )
    assert view["validation_loss"] == 1.5
    assert view["loss"] > 0
    assert view["own"]["accuracy"] == {"median": 0.9, "minimum": 0.9, "maximum": 0.9, "peers": 2}
    assert view["samples_per_s"] > 0
    assert any(
        round["members"] == 2 and round["digest"] and round["digests"] == 1 for round in view["rounds"]
    )
    (history,) = view["histories"]
    assert (history["peers"], history["line"], len(history["head"])) == (2, "", 16)
    assert all(peer["up_bytes"] > 0 and peer["rounds_done"] > 0 for peer in view["peers"])


def test_monitor_once_prints_text_without_control_sequences(
    run: list[Node], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", run[1].addresses[0], "--run", NAME, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "● live" in shown
    assert "anna" in shown
    assert "\x1b" not in shown


def test_a_monitor_leaves_a_log_and_a_history_that_the_next_one_finds(
    run: list[Node], tmp_path: Path
) -> None:
    log, history = tmp_path / "run.jsonl", tmp_path / "history.sqlite"
    command = [
        sys.executable,
        "-m",
        "swarm.cli",
        "monitor",
        run[0].addresses[0],
        "--run",
        NAME,
        "--json",
        "--exit-with-parent",
    ]
    lines: list[dict[str, Any]] = []
    # its pipes are closed also when the test fails: else a later test fails for them
    with subprocess.Popen(
        [*command, "--log", str(log), "--history", str(history)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        views = map(json.loads, child.stdout or ())
        reader = threading.Thread(target=lambda: lines.extend(views))
        reader.start()
        try:
            until(lambda: sum(line["event"] == "view" for line in lines) >= 3, "three views")
            child.terminate()
            assert child.wait(10.0) == 0
        finally:
            child.kill()
            reader.join(5.0)
    assert {line["kind"] for line in lines if line["event"] == "event"} >= {"joined"}
    assert {json.loads(line)["event"] for line in log.read_text().splitlines()} == {"view", "event"}
    with Watch(
        WatchConfig(entry=(Contact.parse(run[0].addresses[0]),), run=NAME, history=lambda run_id: history)
    ) as watch:
        now_s = watch.node.clock.swarm_s()
        assert len(watch.history.series(now_s - 60.0, now_s)["series"]["samples_per_s"]) >= 1
        assert watch.view().events[0].kind == "joined"
        assert not watch.notice


@contextlib.contextmanager
def late(address: str) -> Iterator[str]:
    """Yield another address of this peer, at which it answers no connection before the second one."""
    host, port = Contact.parse(address).addresses[0].host, Contact.parse(address).addresses[0].port
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((host, 0)))
        carriers: list[threading.Thread] = []

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                stack.enter_context(listening.accept()[0])
                while True:
                    near = stack.enter_context(listening.accept()[0])
                    far = stack.enter_context(socket.create_connection((host, port)))
                    for one in ((near, far), (far, near)):
                        carriers.append(threading.Thread(target=carry, args=one))
                        carriers[-1].start()

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield address.replace(f"/tcp/{port}/", f"/tcp/{listening.getsockname()[1]}/")
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            server.join(5.0)
            for one in carriers:
                one.join(5.0)


def test_a_monitor_waits_for_a_peer_that_is_late_to_answer(run: list[Node]) -> None:
    with late(run[0].addresses[0]) as address, Watch(WatchConfig(entry=(address,), run=NAME)) as watch:
        until(lambda: watch.view().live, "a live view")


def test_prometheus_reads_a_live_run(run: list[Node]) -> None:
    config = WatchConfig(entry=(Contact.parse(run[0].addresses[0]),), run=NAME)
    with Watch(config) as watch:
        until(lambda: watch.view().live, "a live view")
        with (
            MetricsServer(watch.view, ("127.0.0.1", 0)) as server,
            urllib.request.urlopen(server.url, timeout=5) as reply,
        ):
            text = reply.read().decode()
    assert "swarm_monitor_up 1.0" in text
    assert 'name="anna"' in text


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--run", "nothing"], 2, "this swarm announces no run"),
        ([], 2, "name one with --run"),
        (["--run", NAME, "--web", "nonsense"], 2, "--web takes HOST:PORT"),
        (["--run", NAME, "--prometheus", "127.0.0.1:99999"], 2, "--prometheus takes HOST:PORT"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(
    run: list[Node], options: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", run[0].addresses[0], "--once", *options]) == code
    assert sentence in capsys.readouterr().err


def test_an_address_without_a_peer_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Node(listen="127.0.0.1:0") as gone:
        address = gone.addresses[0]
    assert main(["monitor", address, "--once"]) == 1
    assert "Ask for the address of another live peer" in capsys.readouterr().err


def test_a_poll_fetches_the_history_of_each_peer_once(
    run: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For members and totals together."""
    wait_for_metrics(run)
    asked: list[str] = []
    totals = threading.Semaphore(0)
    fetch, read = fetch_history, contributors.totals_of

    async def counted(caller: Any, run_id: str, contact: Contact, heads: Any) -> Any:
        asked.append(contact.peer_id.short)
        return await fetch(caller, run_id, contact, heads)

    async def followed(*given: Any) -> Any:
        found = await read(*given)
        totals.release()
        return found

    monkeypatch.setattr(contributors, "fetch_history", counted)
    monkeypatch.setattr("swarm.monitor.watching.totals_of", followed)
    entry = tuple(Contact.parse(node.addresses[0]) for node in run[1:])
    with Watch(WatchConfig(entry=entry, run=NAME)) as watch:
        assert totals.acquire(timeout=_WAIT_S)
        assert sorted(asked) == sorted(one.peer_id.short for one in entry)
        until(lambda: watch.view().leaders, "totals")
