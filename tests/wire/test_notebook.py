"""The notebook for Colab and Kaggle: its cells join a run with an invite, and print what happens."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.membership.invite import Terms, make_invite
from swarm.run import events
from swarm.run.changes import Change, send_version, sign_change
from swarm.run.estimate import read_members
from swarm.run.membership import identity_of
from tests.wire.volunteers import VolunteerThread, created_run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "volunteer.ipynb"


def code_cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "a notebook is kept without outputs"
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_cells_are_python_and_an_invite_that_is_missing_is_said() -> None:
    settings, install, volunteer = code_cells()
    for source in (settings, install, volunteer):
        compile(source, str(NOTEBOOK), "exec")
    known: dict[str, Any] = {}
    exec(settings, known)
    exec(install, known)  # the packages that it would install are present
    with pytest.raises(SystemExit, match="paste the invite"):
        exec(volunteer, known)


def test_a_loss_that_is_not_finite_does_not_end_the_volunteer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, install, volunteer = code_cells()
    known: dict[str, Any] = {"INVITE": "swarm1", "NAME": "", "HOURS": 1.0}
    exec(install, known)
    lines = [{"event": "epoch", "epoch": epoch, "loss": loss} for epoch, loss in ((7, None), (8, 2.5))]
    script = f"print({chr(10).join(map(json.dumps, lines))!r})"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", script], **options)
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(volunteer, known)
    assert "epoch 7  loss not finite" in printed.getvalue()
    assert "epoch 8  loss 2.500" in printed.getvalue()


def test_the_cells_join_an_invited_run_and_train_until_it_ends(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with created_run(members="invited", message="Thank you!") as (node, owner, signed):
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        terms = Terms(roles=("train",), uses=1, lifetime_s=3600.0)
        invite = make_invite(identity_of(signed), owner, (), terms, now_s=time.time())

        def end_when_both_train() -> None:
            one.wait(events.EpochDone, lambda event: event.peers == 2)
            ended = sign_change(signed, Change(ended=True), owner)
            members = node.network.run(read_members(node.dht.service, signed.run_id, node.clock), 10.0)
            node.network.run(send_version(node.channels, ended, members), 10.0)

        ending = threading.Thread(target=end_when_both_train)
        ending.start()
        known: dict[str, Any] = {}
        settings, install, volunteer = code_cells()
        exec(settings, known)
        known |= {"INVITE": invite.with_contacts([node.contact]).text(), "NAME": "notebook", "HOURS": 0.1}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(install, known)
            exec(volunteer, known)
        ending.join(30)
        text = said.getvalue()
        assert "tiny: " in text
        assert "its owner says: Thank you!" in text
        assert "training on " in text
        assert "contributing since epoch " in text
        assert "the run's owner ended it" in text
        assert known["volunteer"].returncode == 0
        one.stop.set()
