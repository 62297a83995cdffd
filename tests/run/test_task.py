"""Tasks of packages: what a volunteer without one is told, errors in a task, the example, the template."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import swarm
from swarm.cli.new_task import new_task
from swarm.core.errors import SwarmError, UsageError
from swarm.run.microbatches import MicroBatches
from swarm.run.specification import RunSpecification
from swarm.run.task import ENTRY_POINT_GROUP, installed_package, make_task

ROOT = Path(__file__).parent.parent.parent
DRAW = swarm.Draw("run", 0, swarm.Identity.generate().peer_id)
CPU = torch.device("cpu")


class BrokenTask:
    """A task whose setting `where` names the method that fails."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.where = settings["where"]
        self._fail("settings")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError("two\nlines")

    def describe(self, batch_size: int) -> swarm.TaskDescription:
        self._fail("describe")
        return swarm.TaskDescription(summary="", parameters=1, sample="", memory_bytes=1)

    def build_model(self, seed: int) -> torch.nn.Module:
        self._fail("build_model")
        return torch.nn.Linear(1, 1)

    def load_data(self, folder: Path | None, device: torch.device) -> BrokenTask:
        self._fail("load_data")
        return self

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        self._fail("loss")
        if self.where == "memory":
            raise MemoryError
        return torch.zeros(2) if self.where == "shape" else model(torch.ones(1, 1)).mean()


def use(task: swarm.Task) -> None:
    """Call the methods of a task."""
    task.describe(1)
    task.load_data(None, CPU).loss(task.build_model(0), 1)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a task known to this process, as that of an installed package."""

    def known(name: str, value: str, package: str = "some-package", version: str = "1.2.0") -> None:
        described = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (described / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return known


@pytest.fixture
def broken(install: Callable[..., None]) -> None:
    install("broken", f"{__name__}:BrokenTask")


def test_a_volunteer_without_the_package_is_told_the_line_that_installs_it() -> None:
    with pytest.raises(UsageError, match=r"'poetry' is not installed.* trust .*: pip install poems==1\.0$"):
        make_task("poetry", {}, "poems==1.0")
    with pytest.raises(UsageError, match="the run does not name one"):
        make_task("poetry", {})


def test_another_version_of_the_package_is_refused(broken: None) -> None:
    assert installed_package("broken") == "some-package==1.2.0"
    make_task("broken", {"where": ""}, "Some_Package==1.2.0")
    with pytest.raises(UsageError, match=r"this machine has some-package==1\.2\.0: .*pip install some-pa.*3"):
        make_task("broken", {"where": ""}, "some-package==1.3")


@pytest.mark.parametrize(
    "package",
    [
        "poems",
        "poems==",
        "poems==1; rm -rf x",
        "-r==1",
        "--index-url=x==1",
        "a b==1",
        "a==1\nb==2",
        "a==$(x)",
    ],
)
def test_a_package_with_characters_for_a_shell_is_refused(package: str) -> None:
    table = {"name": "x", "target_batch_size": 8, "batch_size": 1, "task": {"name": "t", "package": package}}
    with pytest.raises(UsageError, match=r"task\.package"):
        RunSpecification.from_table(table, "test")


@pytest.mark.parametrize("where", ["settings", "describe", "build_model", "load_data", "loss"])
def test_an_error_in_a_task_is_a_sentence_with_its_name(broken: None, where: str) -> None:
    with pytest.raises(
        SwarmError, match=r"^the task 'broken' .*: ZeroDivisionError: two lines \(.*line \d+\)$"
    ):
        use(make_task("broken", {"where": where}))


class MistakenTask:
    """A task with one of the mistakes that people make first. The setting `mistake` names it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.mistake = settings["mistake"]

    def describe(self, batch_size: int) -> Any:
        described = swarm.TaskDescription(summary="", parameters=2, sample="", memory_bytes=1)
        return None if self.mistake == "describe" else described

    def build_model(self, seed: int) -> Any:
        if self.mistake == "no module":
            return [torch.zeros(1)]
        return torch.nn.ReLU() if self.mistake == "no parameters" else torch.nn.Linear(1, 1)

    def load_data(self, folder: Path | None, device: torch.device) -> Any:
        return None if self.mistake == "no data" else self

    @property
    def summary(self) -> str:
        return "" if self.mistake != "summary" else str(1 // 0)

    def loss(self, model: torch.nn.Module, samples: int) -> Any:
        if self.mistake == "a float":
            return 1.0
        hidden = model(torch.ones(1, 1)).sigmoid()
        return hidden.mul_(2).mean() if self.mistake == "changed in place" else hidden.mean()

    def validation_loss(self, model: torch.nn.Module) -> Any:
        return torch.ones(3) if self.mistake == "three losses" else torch.ones(())

    def metrics(self, validation_loss: float) -> Any:
        return {"accuracy": "high"} if self.mistake == "metrics" else {"accuracy": torch.ones(())}


def train_a_step(task: swarm.Task) -> None:
    """Use a task as a volunteer does."""
    task.describe(1)
    model, data = task.build_model(0), task.load_data(None, CPU)
    assert not data.summary
    if task.mistake == "no start_epoch":  # type: ignore[attr-defined]
        data.start_epoch(DRAW)
    MicroBatches(model=model, data=data, device=CPU, emit=lambda event: None).backward(1, model.zero_grad)
    assert isinstance(data.validation_loss(model), float)
    assert data.metrics(1.0) == {"accuracy": 1.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("describe", "failed in describe: TypeError: it must return a swarm.TaskDescription, not None"),
        ("no module", "failed in build_model: TypeError: it must return a torch.nn.Module, not "),
        ("no parameters", "failed in build_model: TypeError: its model has no parameters to train"),
        ("no data", "failed in summary: AttributeError: 'NoneType' object has no attribute 'summary'"),
        ("summary", "failed in summary: ZeroDivisionError: "),
        ("no start_epoch", "failed in start_epoch: AttributeError: .* has no attribute 'start_epoch'"),
        ("a float", "failed in loss: TypeError: it must return one number that depends on the model's param"),
        ("changed in place", "failed in the backward pass: RuntimeError: one of the variables needed for "),
        ("three losses", "failed in validation_loss: ValueError: only one element tensors can be converted"),
        ("metrics", "failed in metrics: ValueError: could not convert string to float: 'high'"),
        ("", ""),
    ],
)
def test_a_mistake_in_a_task_is_a_sentence_with_its_name(
    install: Callable[..., None], mistake: str, said: str
) -> None:
    install("mistaken", f"{__name__}:MistakenTask")
    task = make_task("mistaken", {"mistake": mistake})
    if mistake:
        with pytest.raises(SwarmError, match=f"^the task 'mistaken' {said}") as raised:
            train_a_step(task)
        assert "task_errors.py" not in str(raised.value), "not where the mistake is"
    else:
        train_a_step(task)


def test_a_task_that_cannot_be_imported_is_named(install: Callable[..., None]) -> None:
    install("lost", "no_such_module:Task")
    with pytest.raises(SwarmError, match="the task 'lost' cannot be loaded from no_such_module:Task: "):
        make_task("lost", {})


def test_memory_errors_of_a_task_reach_the_training_loop(broken: None) -> None:
    task = make_task("broken", {"where": "memory"})
    with pytest.raises(MemoryError):
        task.load_data(None, CPU).loss(task.build_model(0), 1)


def test_a_loss_that_is_no_mean_is_explained(broken: None) -> None:
    task = make_task("broken", {"where": "shape"})
    with pytest.raises(
        SwarmError, match=r"failed in loss: .*one number that depends on the model's parameters"
    ):
        task.load_data(None, CPU).loss(task.build_model(0), 1)


def test_the_example_package_is_a_task_with_metrics(install: Callable[..., None]) -> None:
    install("digits", "swarm_digits:Digits", "swarm-digits", "0.1.0")
    task = make_task("digits", {"channels": 2}, "swarm-digits==0.1.0")
    model, data = task.build_model(0), task.load_data(None, CPU)
    data.start_epoch(DRAW)
    first = data.loss(model, 4).item()
    data.start_epoch(DRAW)
    assert first == data.loss(model, 4).item()
    data.validation_loss(model)
    assert 0 <= data.metrics(1.0)["accuracy"] <= 1  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"task\.settings\.channels"):
        make_task("digits", {"channels": 0})


def test_new_task_writes_a_package_whose_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_task.main(["tide-tables"], standalone_mode=False)
    folder = tmp_path / "tide-tables"
    assert 'tide-tables = "tide_tables:TideTablesTask"' in (folder / "pyproject.toml").read_text()
    assert RunSpecification.from_file(folder / "run.toml").task.name == "tide-tables"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    with pytest.raises(UsageError, match="exists already"):
        new_task.main(["tide-tables"], standalone_mode=False)


@pytest.mark.parametrize("name", ["../x", "a/b", "Upper", "", "x" * 41, "torch", "class", "a--b", "-x"])
def test_new_task_refuses_names_that_are_no_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        new_task.main(["--", name], standalone_mode=False)
    assert not list(tmp_path.iterdir())
