"""Presentation of `swarm serve`: lines of a log, JSON lines, and the live table."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from swarm.cli.render.output import JsonOutput, PlainOutput
from swarm.cli.render.serve import ExpertLoad, Served, ServePresentation, ServerLoadShown, load_table
from swarm.run.events import Listening, Notice

SERVED = Served(
    experts=[f"ffn.{number}" for number in range(12)],
    resumed=["ffn.3"],
    grid="grid.ffn@abc",
    created=True,
    expert_class="ffn",
    parameters=1234567,
    schema="(float32(batch, 8)) -> float32(batch, 8)",
    device="cpu",
    address="/ip4/127.0.0.1/tcp/1/tls/http/p2p/x",
    snippet='import swarm, torch\nnode = swarm.Node(bootstrap=["x"])',
)


def load(samples: int) -> ServerLoadShown:
    one = ExpertLoad(
        name="ffn.0",
        version=7,
        forward_samples=samples,
        backward_samples=3,
        samples_per_s=10.0,
        requests_per_batch=1.5,
        busy=0.25,
        refused=2,
        failed=1,
    )
    return ServerLoadShown(queued=4, wait_s=0.012, experts=[one])


def test_a_log_shows_a_load_only_when_samples_were_computed() -> None:
    stream = io.StringIO()
    output = PlainOutput(ServePresentation(), stream)
    output.emit(Listening(peer_id="12D", addresses=["/ip4/1.2.3.4/tcp/1"], reach="direct"))
    output.emit(SERVED)
    for number in range(40):
        output.emit(load(10 if number < 20 else 20))
    output.emit(Notice(text="bad \x1b[31mred"))
    text = stream.getvalue()
    assert "serving 12 experts on cpu: ffn.0, ffn.1" in text
    assert "and 4 more; 1 resumed from a checkpoint" in text
    assert "\n    node = swarm.Node(" in text  # in one piece, so that it can be copied
    assert text.count("4 requests queued, a new one waits 12 ms") == 2  # only new loads, and not each one
    assert "\x1b" not in text


def test_an_invite_is_not_called_an_address() -> None:
    stream = io.StringIO()
    output = PlainOutput(ServePresentation(), stream)
    output.emit(SERVED)
    output.emit(replace(SERVED, address="swarm1abc"))
    assert "  address   /ip4/127.0.0.1" in stream.getvalue()
    assert "  invite    swarm1abc" in stream.getvalue()


def test_a_load_is_a_json_line() -> None:
    stream = io.StringIO()
    JsonOutput(stream).emit(load(10))
    line = json.loads(stream.getvalue())
    assert line["event"] == "load"
    assert line["experts"][0]["busy"] == 0.25


def test_the_live_table_shows_the_busiest_experts() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    many = [
        ExpertLoad(
            **{
                **{name: getattr(load(1).experts[0], name) for name in ExpertLoad.__slots__},
                "name": f"ffn.{n}",
            }
        )
        for n in range(30)
    ]
    console.print(load_table(ServerLoadShown(queued=0, wait_s=0.0, experts=many)))
    text = console.export_text()
    assert "requests/batch" in text
    assert "25 %" in text
    assert "and 10 that are less busy" in text
