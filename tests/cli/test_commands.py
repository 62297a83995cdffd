"""Errors, help and exit codes of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.node import Node

ROOT = Path(__file__).parents[2]
NOBODY = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"
RUN = 'name = "tiny"\ntarget_batch_size = 64\nbatch_size = 8\n[task]\nname = "bytelm"\n'


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


COMMANDS = (
    "bootstrap",
    "change",
    "config",
    "contributors",
    "dashboard",
    "demo",
    "doctor",
    "experts",
    "export",
    "identity",
    "invite",
    "join",
    "monitor",
    "new-task",
    "pause",
    "recover",
    "resume",
    "runs",
    "serve",
    "service",
    "start",
)


def error_text(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text on standard error, without a traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["join", "nonsense"],
            "swarm: this machine took part in no run 'nonsense', and knows no peer of it",
        ),
        (["monitor", "nonsense"], "On the local network, `swarm join` without arguments looks for runs"),
        (["change", "nonsense", "--end"], "only the owner of a run changes it, and this user owns none"),
        (["change", "nonsense", "--end"], "Name the owner's identity with --identity\n"),
        (
            ["dashboard", "nonsense"],
            "for the owner of a run (others watch it with `swarm monitor`), and this",
        ),
        (
            ["recover", "nonsense", "--recovery-key", "/no/such"],
            "swarm: --recovery-key /no/such: there is no such identity file",
        ),
        (
            ["start", str(ROOT / "examples" / "bytelm.toml"), "--recovery-key", "absent"],
            "swarm: --recovery-key takes a PeerID or an identity file, and there is no file absent",
        ),
        (["recover", "nonsense", "--recovery-key", "~no-such-user/key"], "there is no such home folder"),
        (
            ["start", str(ROOT / "examples" / "bytelm.toml"), "--recovery-key", "x" * 300],
            "cannot use the identity file xxx",
        ),
        (["identity", "--identity", "x" * 300], "cannot use the identity file xxx"),
        (["change", "nonsense", "--end", "--identity", "~no-such-user/key"], "there is no such home folder"),
        (
            ["start", str(ROOT / "examples" / "grid.toml")],
            "grid.toml describes a grid of experts: it is a file for `swarm serve`",
        ),
        (
            ["serve", str(ROOT / "examples" / "bytelm.toml"), "--listen", "127.0.0.1:0"],
            "bytelm.toml describes a run: it is a file for `swarm start`",
        ),
        (["join", "/ip4/1.1.1.1/tcp/1"], "names no peer: an address ends in /p2p/<PeerID>"),
        (
            ["join", "/ip4/127.0.0.1/tcp/4000/tls/http/p2p/12D3KooWCXSA1ifn", "--yes"],
            "swarm: '12D3KooWCXSA1ifn' is too short for a PeerID, by 36 of 52 characters: was the",
        ),
        (
            ["join", "x", "--hours", "5-5", "--yes"],
            "swarm: Invalid value for '--hours': '5-5' ends when it begins: hours are like 22-7",
        ),
        (["identity", "--identity", str(ROOT / "README.md")], "README.md is no identity file"),
        (["join", "/ip4/300.1.1.1/tcp/1/p2p/x", "--yes"], "swarm: 'x' is not a PeerID"),
        (["join", NOBODY], "swarm: there is no terminal to ask on: pass --yes"),
        (
            ["join", NOBODY, "--yes", "--data", "/no/such/folder"],
            "swarm: --data /no/such/folder: there is no such folder",
        ),
        (["join", NOBODY, "--yes", "--listen", "nowhere"], "nowhere"),
        (["join", "--libp2p-bootstrap", NOBODY], "finds a run by its name: pass the name"),
        (["join", "x", "--libp2p-bootstrap", "nonsense"], "'nonsense' names no peer"),
        (["join"], "swarm: there is no terminal to ask on: pass --yes"),
        (["join", NOBODY, "nonsense"], "swarm: 'nonsense' names no peer"),
        (["monitor", NOBODY, "nonsense"], "swarm: 'nonsense' names no peer"),
        (["start", "absent.toml"], "swarm: cannot read absent.toml: No such file or directory"),
        (["start", str(ROOT)], "Is a directory"),
        (
            ["monitor", NOBODY, "--once", "--web", "127.0.0.1:0", "--log", "run.jsonl"],
            "swarm: --once prints the state and exits: leave --web, --log out, or --once\n",
        ),
        (["monitor", NOBODY, "--once", "--alert-command", "true"], "leave --alert-command out"),
        (["start", "absent.toml", "--frob"], "No such option"),
        (
            ["start", "absent.toml", "--checkpoint-every", "soon"],
            "Invalid value for '--checkpoint-every': a duration is written like 90s, 10m, 2h or 7d, not",
        ),
        (["invite", "tiny", "--expires", "soon"], "Invalid value for '--expires': a duration is written"),
        (["monitor", "x", "--every", "soon"], "Invalid value for '--every': a duration is written"),
        (["serve", "--memory", "x"], "Invalid value for '--memory': a size is written like 4G or 800M, not"),
        (["frob"], "No such command"),
        (["demo", "--volunteers", "99"], "99 is not in the range"),
        (["identity"], "there is no identity file"),
        (["config", "--run", "bytelm@abc", "daily=1G"], "--run takes the name of a run, like bytelm"),
        (
            ["identity", "--import", "copy", "--passphrase-file", "absent"],
            "swarm: cannot read a passphrase from absent: No such file or directory\n",
        ),
        (["serve"], "swarm: say what to host: --experts PATTERN, a GRID.toml, or the address of a swarm"),
        (["serve", "a.toml", "b.toml"], "hosts the experts of one grid: give one file"),
        (["serve", "absent.toml"], "swarm: cannot read absent.toml: No such file or directory"),
        (["start", "a.toml", "--data", "x" * 300], "there is no such folder"),
        (["serve", "~nosuchuser/grid.toml"], "~nosuchuser/grid.toml: there is no such home folder"),
        (["serve", "a.toml", "--lr", "1", "--dtype", "float16"], "leave --dtype, --lr out"),
        (["serve", "nonsense", "--experts", "ffn.0"], "this machine took part in no run 'nonsense'"),
        (["serve", "--experts", "ffn.0", "--open", "--open-training"], "choose it or --open-training"),
        (["serve", "--experts", "ffn"], "'ffn' has no dimensions: a grid reads like ffn.[0:4].[0:4]"),
        (["serve", "--experts", "ffn.[4:2]"], "is empty"),
        (
            [
                *("serve", "--experts", "a.0", "--experts", "b.0"),
                *("--num-experts", "3", "--listen", "127.0.0.1:0"),
            ],
            "a.0, b.0 has 2 experts, and 3 are asked for: choose fewer",
        ),
        (
            ["serve", "--experts", "ffn.0", "--warmup-steps", "9", "--training-steps", "9"],
            "they must exceed --warmup-steps",
        ),
        (
            ["serve", "--experts", "ffn.0", "--listen", "127.0.0.1:0", "--expert-class", "fnn"],
            "there is no expert class 'fnn' on this machine",
        ),
        (
            ["serve", "--experts", "ffn.0", "--listen", "127.0.0.1:0", "--module", "absent.py"],
            "no such Python file",
        ),
        (
            ["serve", "--experts", "ffn.0", "--listen", "127.0.0.1:0", "--device", "nonsense"],
            "a device is auto, cpu, cuda, cuda:N or mps",
        ),
        (
            ["serve", "--experts", "ffn.[0:4].[0:4]", "--num-experts", "17", "--listen", "127.0.0.1:0"],
            "has 16 experts, and 17 are asked for: choose fewer",
        ),
        (["bootstrap", "--listen", "127.0.0.1:99999", "--identity", "new"], "99999"),
        (["bootstrap", "--listen", "none"], "an entry point must accept calls"),
        (
            ["serve", "--experts", "ffn.0", "--listen", "none"],
            "through relays of a swarm: give an ADDRESS",
        ),
        (
            ["join", NOBODY, "--yes", "--listen", "none", "--announce", "a.example"],
            "--listen none refuses calls",
        ),
        (["join", NOBODY, "--yes", "--announce", "not a host"], "'not a host' is neither an IP address"),
        (["join", NOBODY, "--yes", "--announce", "host:port"], "'host:port' is not an address to announce"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = error_text(capsys)
    assert sentence in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("64", "-1"), "target_batch_size must be greater than or equal to 1, not -1"),
        (('"bytelm"', '"poetry"'), "run.toml: the task 'poetry' is not installed on this machine"),
        (
            ('name = "bytelm"', 'name = "bytelm"\n[task.settings]\nwidth = 10\nheads = 3'),
            "width (10) must be a multiple of heads (3)",
        ),
        (("name =", "name"), "is not valid TOML"),
    ],
)
def test_a_wrong_run_file_is_refused_before_anything_starts(
    change: tuple[str, str], sentence: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(RUN.replace(*change))
    assert main(["start", str(run_file), "--listen", "127.0.0.1:0"]) == 2
    assert sentence in error_text(capsys)


def test_a_home_that_is_no_folder_is_named_once(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(run_file))
    assert main(["start", str(run_file), "--listen", "127.0.0.1:0"]) == 2
    text = error_text(capsys)
    assert f"swarm: {run_file / 'preferences.toml'} cannot be read: Not a directory" in text
    assert text.count(str(run_file)) == 1


def test_a_dead_bootstrap_peer_is_reported_with_cause_and_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Check the command's own timeouts, not elapsed time: with eight other processes running it took 45 s, of
    # which this process ran for 2 s.
    waits_s: list[float] = []
    wait = Node.wait_joined

    def wait_joined(node: Node, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        return wait(node, timeout_s)

    monkeypatch.setattr(Node, "wait_joined", wait_joined)
    assert main(["join", NOBODY, "--yes", "--json"]) == 1
    captured = capsys.readouterr()
    assert "nobody answers at" in captured.err
    assert "connection refused" in captured.err
    assert "Ask for the address of another live peer" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["event"] == "error"
    assert sum(waits_s) < 10


def test_an_identity_is_created_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine"
    assert main(["identity", "--identity", str(path)]) == 2
    assert main(["identity", "--create", "--json", "--identity", str(path)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["identity", "--json", "--identity", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (made["peer_id"], made["created"], shown["created"]) == (shown["peer_id"], True, False)
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600


def test_an_identity_in_use_is_reported_with_the_next_step(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from swarm.core.identity import Identity

    held = Identity.load(tmp_path / "home" / "identity")
    try:
        assert main(["identity", "--json", "--identity", str(tmp_path / "home" / "identity")]) == 0
        assert json.loads(capsys.readouterr().out)["peer_id"] == str(held.peer_id)  # showing needs no lock
        assert main(["start", str(run_file), "--listen", "127.0.0.1:0"]) == 2
    finally:
        held.close()
    text = error_text(capsys)
    assert "is using the identity file" in text
    assert "--identity new" in text


def test_help_imports_nothing_heavy_and_lists_every_command() -> None:
    program = (
        "import sys; from swarm.cli import main; main(['--help']);"
        "heavy = {'torch', 'grpc', 'pydantic', 'rich', 'asyncio', 'uvloop', 'cryptography'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert set(COMMANDS) == {
        line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines()[:-1] if line.strip()
    }


def test_the_help_of_every_command_imports_no_torch() -> None:
    program = (
        "import sys; from swarm.cli import main;"
        f"codes = [main([command, '--help']) for command in {COMMANDS!r}];"
        "print(sum(codes), sorted({'torch', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert "exit-with-parent" not in text


@pytest.mark.parametrize("command", ["contributors", "doctor"])
def test_the_help_says_that_an_owners_identity_is_not_the_one_that_observes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert "The owner of the named run enters as a new peer instead" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(("chosen", "expected"), [(None, "20000"), ("ACTIVE", None)])
def test_the_threads_of_torch_spin_shortly_unless_the_user_chose_otherwise(
    chosen: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # restored at the end
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    assert main(["--version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import swarm

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"swarm {swarm.__version__}\n"


def test_help_is_shown_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err
