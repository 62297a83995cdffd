"""Alerts of a monitor: what causes them, how often they are sent, and how they are delivered."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from swarm.cli.commands import swarm
from swarm.core.errors import UsageError
from swarm.monitor.alerting import AlertChannels, Alerting
from swarm.monitor.logic.alerts import DAY_MAX, REPEAT_S, Alert, Alerts
from swarm.monitor.logic.view import HistoryView, LinkView, MonitorEvent, MonitorView, PeerView, RunView

RUN = RunView(run_id="a" * 20, name="tiny", version=1)
START_S = 1_000_000.0


def view(at_s: float, **changes: Any) -> MonitorView:
    plain = MonitorView(
        at_s=START_S + at_s,
        run=RUN,
        link=LinkView(status="live"),
        epoch=int(at_s // 30),
        loss=2.0,
        peers_live=4,
        samples_per_s=10.0,
    )
    return replace(plain, **changes)


def peer(number: int, broken: tuple[str, ...] = ()) -> PeerView:
    return PeerView(
        peer_id=str(number), short=str(number), state="training", age_s=1.0, fresh=True, broken=broken
    )


def event(number: int, kind: str, text: str) -> MonitorEvent:
    return MonitorEvent(number=number, at_s=0.0, kind=kind, level="warning", text=text)


def alerts_of(views: Iterator[MonitorView]) -> list[Alert]:
    alerts = Alerts()
    return [alert for one in views for alert in alerts.step(one)]


def test_a_run_that_goes_on_as_usual_causes_no_alert_in_a_day() -> None:
    noise = [0.0, 0.2, -0.2, 0.1]
    views = (
        view(second, loss=3.0 - second / 86400 + noise[second // 5 % 4], peers_live=4 - second // 600 % 2)
        for second in range(0, 86400, 5)
    )
    assert not alerts_of(views)


def test_a_loss_that_diverges_causes_one_alert_an_hour() -> None:
    views = (view(second, loss=2.0 if second < 1200 else 3.5) for second in range(0, 3 * 3600, 5))
    found = alerts_of(views)
    assert [one.kind for one in found] == ["loss", "loss", "loss"]
    assert found[0].text == "the loss is 3.5, and was 2 before"
    assert found[0].at_s - START_S < 1200 + 130
    assert found[1].at_s - found[0].at_s >= REPEAT_S
    assert found[1].withheld > 30


def test_a_loss_that_is_no_number_for_most_peers_causes_an_alert_and_that_of_one_peer_none() -> None:
    one = [peer(1, ("loss",)), peer(2), peer(3)]
    assert not alerts_of(iter([view(0, peers=tuple(one))]))
    most = [peer(1, ("loss",)), peer(2, ("validation_loss",)), peer(3)]
    (found,) = alerts_of(iter([view(0, peers=tuple(most))]))
    assert found.text == "the loss of 2 of 3 peers is not a finite number"


def test_an_epoch_that_does_not_end_causes_an_alert_unless_the_run_is_paused() -> None:
    def stalled(**run: bool) -> list[Alert]:
        changed = replace(RUN, **run)  # type: ignore[arg-type]
        return alerts_of(
            view(second, epoch=min(second // 30, 20), run=changed if second > 600 else RUN)
            for second in range(0, 2400, 5)
        )

    (found,) = stalled()
    assert found.kind == "stall"
    assert found.text == ("epoch 20 has not ended for 10 min, and 4 peers train; epochs usually take 30 s")
    assert not stalled(paused=True)
    assert not stalled(ended=True)


def test_half_of_the_members_that_go_cause_one_alert() -> None:
    views = (view(second, peers_live=9 if second < 300 else 4) for second in range(0, 1200, 5))
    (found,) = alerts_of(views)
    assert (found.kind, found.at_s - START_S) == ("members", 300)
    assert found.text == "4 of 9 peers are left of those that took part a few minutes ago"


def test_a_swarm_that_answers_no_more_causes_an_alert() -> None:
    lost = LinkView(status="lost", text="Trying 3 peers met before")
    found = alerts_of(view(second, link=lost) for second in range(0, 7000, 5))
    assert [one.text for one in found] == ["no peer answers the monitor. Trying 3 peers met before"] * 2


def test_breaks_and_reunions_cause_an_alert_and_old_events_none() -> None:
    old = event(1, "break", "an old break")
    new = event(2, "break", "a and b continued without a majority")
    joined = event(3, "joined", "c joined")
    found = alerts_of(
        iter([view(0, events=(old,)), view(5, events=(old,)), view(10, events=(old, new, joined))])
    )
    assert [(one.kind, one.text) for one in found] == [("lineage", "a and b continued without a majority")]
    parts = (
        HistoryView(head="1" * 16, line="", epoch=3, peers=3),
        HistoryView(head="2" * 16, line="", epoch=3, peers=1),
    )
    (divided,) = alerts_of(view(second, histories=parts) for second in range(0, 600, 5))
    assert divided.text == "peers are in 2 histories: 3 in 11111111, 1 in 22222222"


def test_there_are_at_most_so_many_alerts_in_a_day() -> None:
    alerts = Alerts()
    count = 0
    for second in range(0, 86_000, 20):
        lost = LinkView(status="lost")
        peers = (peer(1, ("loss",)),)
        count += len(alerts.step(view(second, epoch=1, peers=peers)))
        count += len(alerts.step(view(second, link=lost)))
    assert 40 < count <= DAY_MAX


class Hook(http.server.BaseHTTPRequestHandler):
    """A web server that refuses the first request and stores what it receives."""

    received: ClassVar[list[dict[str, Any]]] = []
    refuse = 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Hook.refuse:
            Hook.refuse -= 1
            self.send_response(503)
            self.end_headers()
            return
        Hook.received.append(body)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(server: socketserver.TCPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_alerts_reach_a_web_address_and_a_command_and_carry_no_control_characters(tmp_path: Path) -> None:
    Hook.received, Hook.refuse = [], 1
    mail, said, told = tmp_path / "mail", list[str](), threading.Event()
    script = f"import pathlib, sys; pathlib.Path({str(mail)!r}).write_text(sys.stdin.read())"

    def tell(text: str) -> None:
        said.append(text)

    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)) as url:
        channels = AlertChannels.parse(url, f'"{sys.executable}" -c "{script}"')
        with Alerting(channels, tell, pause_s=0.01) as alerting:
            alerting.on_view(view(0))
            hostile = event(7, "break", "a\r\nBcc: everybody\x1b[31m \u202eb continued without a majority")
            alerting.on_view(view(5, events=(hostile,)))
            deadline_s = time.monotonic() + 30.0
            while not mail.exists() and len(said) < 2:
                assert time.monotonic() < deadline_s, "neither a mail nor a failure came within 30 s"
                told.wait(0.05)  # nothing tells that the command has ended
    (body,) = Hook.received
    assert body["kind"] == "lineage"
    assert body["event"] == "alert"
    assert body["text"] == body["content"]
    assert body["text"].startswith(f"tiny@{'a' * 20}: a  Bcc: everybody")
    assert not any(ord(one) < 32 or one == "\u202e" for one in body["text"])
    lines = mail.read_text().splitlines()
    assert lines[0] == f"Subject: swarm: lineage of tiny@{'a' * 20}"
    assert lines[1] == ""
    assert len(lines) == 3
    assert said[0].startswith("alert: a  Bcc")


def test_a_web_server_that_answers_no_http_stops_no_later_alert() -> None:
    said, told = list[str](), threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        if len(said) == 4:
            told.set()

    class Garbage(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"no HTTP\r\n\r\n")

    with (
        served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbage)) as url,
        Alerting(AlertChannels.parse(url, None), tell, pause_s=0.01) as alerting,
    ):
        alerting.on_view(view(0, link=LinkView(status="lost")))
        alerting.on_view(view(REPEAT_S, link=LinkView(status="lost")))
        assert told.wait(30), said
    assert [one.split(":")[0] for one in said] == ["alert", "an alert could not be sent"] * 2


def test_an_alert_that_cannot_be_sent_is_said(tmp_path: Path) -> None:
    said, told = list[str](), threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        if len(said) > 1:
            told.set()

    channels = AlertChannels.parse(None, f'"{sys.executable}" -c "import sys; sys.exit(\'no mail here\')"')
    with Alerting(channels, tell, pause_s=0.01) as alerting:
        alerting.on_view(view(0, link=LinkView(status="lost")))
        assert told.wait(30)
    assert said[1].startswith("an alert could not be sent: ")
    assert said[1].endswith("ended with 1: no mail here")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org",
        "example.org/hook",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "http://example.org:99999/hook",
        "http://example.org:port/hook",
        "http://example.org/a hook",
    ],
)
def test_a_webhook_is_a_web_address(url: str) -> None:
    with pytest.raises(UsageError, match="--alert-webhook is an address like https"):
        AlertChannels.parse(url, None)


def test_a_wrong_command_for_alerts_is_said_at_once() -> None:
    address = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    result = CliRunner().invoke(swarm, ["monitor", address, "--alert-command", "mail 'unfinished"])
    assert isinstance(result.exception, UsageError)
    assert "--alert-command cannot be read: No closing quotation" in str(result.exception)
