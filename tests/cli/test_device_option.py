"""The option --device is the same for every command and checked before anything is opened or published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.cli import main

ROOT = Path(__file__).parents[2]
NOBODY = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"
RUN = 'name = "tiny"\ntarget_batch_size = 64\nbatch_size = 8\n[task]\nname = "bytelm"\n'
COMMANDS = ("start", "join", "serve")


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command opens a node or this user's identity."""

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("something was opened before the device was checked")

    monkeypatch.setattr("swarm.node.Node", opened)
    monkeypatch.setattr("swarm.cli.train.open_identity", opened)
    monkeypatch.setattr("swarm.cli.train.open_entry_identity", opened)
    monkeypatch.setattr("swarm.cli.serve_choices.ServeChoices.open_identity", opened)


def arguments(command: str, folder: Path, device: str, run: str = RUN) -> list[str]:
    (folder / "run.toml").write_text(run)
    given = {"start": [str(folder / "run.toml")], "join": [NOBODY, "--yes"], "serve": ["--experts", "ffn.0"]}[
        command
    ]
    return [command, *given, "--listen", "127.0.0.1:0", "--device", device]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0"])
@pytest.mark.usefixtures("no_node")
def test_every_command_refuses_a_name_that_is_no_device(
    command: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(command, tmp_path, device)) == 2
    text = capsys.readouterr().err
    assert f"'--device': a device is auto, cpu, cuda, cuda:N or mps, not '{device}'" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_name_is_refused_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    given = arguments(command, tmp_path, "gpu")
    program = f"import sys; from swarm.cli import main; print(main({given!r}), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.split() == ["2", "False"], f"exit status {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
@pytest.mark.usefixtures("no_node")
def test_a_device_that_is_missing_here_is_refused_before_anything_is_opened(
    command: str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(arguments(command, tmp_path, device)) == 2
    text = capsys.readouterr().err
    assert f"swarm: --device {device} was given, but " in text
    assert "use --device cpu, or auto" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("no_node")
def test_an_index_beyond_the_last_gpu_is_refused_with_the_valid_ones(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(arguments(command, tmp_path, "cuda:7")) == 2
    assert "--device cuda:7 was given, but this machine has cuda:0 to cuda:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("cpu", "--device cpu was given: give --device cuda"),
        ("mps", "--device mps was given: give --device cuda"),
        ("auto", "torch"),
    ],
)
@pytest.mark.usefixtures("no_node")
def test_a_run_that_requires_cuda_is_not_created_on_a_machine_without(
    device: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = RUN + '[requirements]\ndevice = "cuda"\n'
    assert main(arguments("start", tmp_path, device, run)) == 2
    text = capsys.readouterr().err
    assert "the run tiny is trained on CUDA devices only, and" in text
    assert sentence in text


def test_the_option_reads_the_same_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        _, _, after = capsys.readouterr().out.partition("--device DEVICE")
        texts.add(" ".join(after.split("\n  --")[0].split()))
    assert len(texts) == 1
    assert "cuda:N or mps" in texts.pop()
