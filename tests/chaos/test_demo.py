"""`swarm demo` from start to end, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
def test_the_demo_trains_prints_a_summary_and_ends() -> None:
    command = [sys.executable, "-m", "swarm.cli", "demo", "--json", "--seconds", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    summary = lines[-1]
    assert done.returncode == 0, (done.stderr, summary)
    assert summary["event"] == "summary"
    assert summary["problems"] == []
    assert summary["digests_equal"]
    assert summary["loss_first"] == pytest.approx(5.55, abs=0.1)
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert len(summary["peers"]) == 3
    assert all(peer["samples"] > 0 and peer["rounds"] > 0 for peer in summary["peers"])
    assert summary["join_line"].startswith("swarm join swarm1")
    assert {line["from"] for line in lines[:-1]} == {"bootstrap", "founder", "volunteer 2", "volunteer 3"}


@pytest.mark.chaos
def test_the_demo_serves_its_page_until_it_ends() -> None:
    command = [
        sys.executable,
        "-m",
        "swarm.cli",
        "demo",
        "--json",
        "--seconds",
        "10",
        "--volunteers",
        "2",
        "--web",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        told, url = [], ""
        for line in child.stdout:
            told.append(json.loads(line))
            if told[-1].get("url"):
                url = told[-1]["url"]
            if url and told[-1].get("event") == "epoch":
                break
        with urllib.request.urlopen(f"{url}api/view", timeout=10) as reply:
            view = json.load(reply)
        assert view["run"]["name"] == "demo"
        named = {peer["name"] for peer in view["peers"]} - {""}  # whose metrics have not been read yet
        assert named <= {"founder", "volunteer 2"}
        rest, errors = child.communicate(timeout=200)
        assert child.returncode == 0, (errors, rest[-2000:])
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=2)


def test_the_plain_demo_prints_no_control_characters_and_reports_failures() -> None:
    """If the bootstrap peer cannot start, the command prints the reason and exits with 1."""
    program = (
        "import sys, swarm.cli.demo as demo; demo._LOOPBACK = ('--listen', 'nonsense', '--identity', 'new');"
        "from swarm.cli import main; sys.exit(main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "problem: bootstrap: " in done.stdout
    assert "nonsense" in done.stdout
    assert all(character == "\n" or character.isprintable() for character in done.stdout)
    assert "Traceback" not in done.stdout + done.stderr
