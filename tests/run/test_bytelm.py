"""The task `bytelm` describes the model that it builds, and its samples depend only on (run, epoch, peer)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.run.task import Draw, available_tasks, make_task
from swarm.run.tasks.bytelm import ByteLanguageModel
from swarm.run.tasks.bytelm_model import ByteData
from swarm.run.tasks.corpus import is_held_out, read_corpus

CPU = torch.device("cpu")
SMALL = {"width": 16, "layers": 2, "heads": 2, "context": 16}
MIXED = {**SMALL, "experts": 4}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {number}: " + "the quick brown fox jumps over the lazy dog. " * 20)
    return folder


@pytest.fixture
def data(texts: Path) -> ByteData:
    return ByteData(read_corpus(texts, bytes_max=1 << 20, sample_bytes=17), context=16, device=CPU)


@pytest.mark.parametrize("settings", [{}, SMALL, {**SMALL, "layers": 3, "context": 5}, MIXED])
def test_parameters_are_counted_without_building_the_model(settings: dict[str, int]) -> None:
    task = make_task("bytelm", settings)
    shapes = [tuple(p.shape) for p in task.build_model(0).parameters()]
    assert task.describe(8).parameters == sum(math.prod(shape) for shape in shapes)
    assert sorted(task.describe(8).shapes) == sorted(shapes)


@pytest.mark.parametrize("settings", [SMALL, MIXED], ids=["dense", "experts"])
def test_the_same_seed_builds_the_same_model_and_leaves_the_global_generator_alone(
    settings: dict[str, int],
) -> None:
    task = make_task("bytelm", settings)
    first, second, other = task.build_model(1), task.build_model(1), task.build_model(2)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_the_first_loss_is_that_of_a_uniform_guess(data: ByteData) -> None:
    model = make_task("bytelm", SMALL).build_model(0)
    assert data.loss(model, 8).item() == pytest.approx(math.log(256), abs=0.1)
    assert data.validation_loss(model) == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize("settings", [SMALL, MIXED], ids=["dense", "experts"])
def test_attention_is_causal(settings: dict[str, int]) -> None:
    model = make_task("bytelm", settings).build_model(0)
    text = torch.arange(16)[None]
    changed = text.clone()
    changed[0, 9:] = 200
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("settings", [SMALL, MIXED], ids=["dense", "experts"])
def test_the_loss_falls_in_training(data: ByteData, settings: dict[str, int]) -> None:
    model = make_task("bytelm", settings).build_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = data.validation_loss(model)
    for _ in range(60):
        optimizer.zero_grad()
        data.loss(model, 8).backward()
        optimizer.step()
    assert data.validation_loss(model) < before - 2


def test_the_same_run_epoch_and_peer_draw_the_same_samples(texts: Path) -> None:
    peer = Identity.generate().peer_id
    draws = []
    for _ in range(2):
        data = ByteData(read_corpus(texts, bytes_max=1 << 20, sample_bytes=17), context=16, device=CPU)
        data.batch(3)  # earlier draws do not matter
        data.start_epoch(Draw("run", 7, peer))
        draws.append(torch.cat([data.batch(4), data.batch(5)]))
    assert torch.equal(*draws)


def test_another_run_epoch_or_peer_draws_other_samples(data: ByteData) -> None:
    peer, other = Identity.generate().peer_id, Identity.generate().peer_id
    drawn = []
    for draw in (Draw("run", 7, peer), Draw("run2", 7, peer), Draw("run", 8, peer), Draw("run", 7, other)):
        data.start_epoch(draw)
        drawn.append(data.batch(8))
    assert all(not torch.equal(drawn[0], different) for different in drawn[1:])


def test_a_seed_is_the_same_on_every_machine_and_version() -> None:
    """If this number changed, volunteers of different versions would draw different samples."""
    from swarm.core.ids import PeerId

    assert Draw("abc", 5, PeerId(bytes(32))).seed == 3835733727977001568


def test_held_out_files_are_never_trained_on(tmp_path: Path) -> None:
    for number in range(400):
        (tmp_path / f"{number}.txt").write_text(f"<{number}>" * 10)
    corpus = read_corpus(tmp_path, bytes_max=1 << 20, sample_bytes=10)
    held_out = [number for number in range(400) if is_held_out(f"{number}.txt")]
    assert 5 < len(held_out) < 60
    assert all(f"<{number}>".encode() not in corpus.training for number in held_out)
    assert all(f"<{number}>".encode() in corpus.held_out for number in held_out)


def test_one_long_file_gives_its_end_as_the_held_out_part(tmp_path: Path) -> None:
    name = next(f"{n}.txt" for n in range(100) if not is_held_out(f"{n}.txt"))
    (tmp_path / name).write_bytes(bytes(range(250)) * 40)
    corpus = read_corpus(tmp_path, bytes_max=1 << 20, sample_bytes=10)
    assert (len(corpus.training), len(corpus.held_out)) == (9500, 500)


def test_reading_stops_at_bytes_max(texts: Path) -> None:
    corpus = read_corpus(texts, bytes_max=20_000, sample_bytes=10)
    assert len(corpus.training) + len(corpus.held_out) == 20_000


def test_unusable_folders_are_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder that can be read"):
        read_corpus(tmp_path / "absent", bytes_max=1000, sample_bytes=10)
    (tmp_path / "picture.png").write_bytes(b"x" * 10_000)
    with pytest.raises(UsageError, match="holds too little text"):
        read_corpus(tmp_path, bytes_max=1000, sample_bytes=10)


def test_the_standard_library_is_the_default_corpus() -> None:
    corpus = read_corpus(None, bytes_max=1 << 20, sample_bytes=129)
    assert corpus.files > 10
    assert len(corpus.held_out) > 129


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 10, "heads": 3}, "width (10) must be a multiple of heads (3)"),
        ({"depth": 3}, "task.settings.depth is not a known key"),
        ({"layers": 0}, "task.settings.layers must be greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_usage_errors_that_name_the_key(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ByteLanguageModel(settings)
    assert message in str(error.value)


def test_make_task_names_the_installed_tasks_when_one_is_missing() -> None:
    assert "bytelm" in available_tasks()
    with pytest.raises(UsageError, match=r"'poetry' is not installed .*\(installed: .*bytelm"):
        make_task("poetry", {})
