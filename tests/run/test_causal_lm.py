"""The task causal-lm on a tiny model that is made on the disk: methods, data, shards, export, and what the
file of a run may not do.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")

import huggingface_hub

import swarm
from swarm.core.errors import NetworkError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.working import Work, shown_by
from swarm.run.task import make_task
from swarm.run.tasks.causal_lm import CausalLanguageModel
from swarm.run.tasks.causal_lm_data import TextData
from swarm.testing.tiny_model import TINY_DIGEST_LINE, write_tiny_model

# PEFT uses what the newest transformers deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CPU = torch.device("cpu")
COMMIT = "1234567890" * 4
PEERS = [Identity.generate().peer_id for _ in range(3)]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def models(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder of models, with the tiny one."""
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    shutil.copytree(made, tmp_path / "models" / "tiny")
    return tmp_path / "models"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": f"{number} times two is {2 * number}. " * 8}) for number in range(60)]
    (folder / "numbers.jsonl").write_text("\n".join(lines))
    return folder


def digest_of(folder: Path) -> str:
    with pytest.raises(UsageError, match=TINY_DIGEST_LINE) as refused:
        CausalLanguageModel({"model": folder.name})
    return str(refused.value).rpartition('digest = "')[2].rstrip('"')


def settings_of(models: Path, **more: Any) -> dict[str, Any]:
    method = more.get("method", "lora")
    digest = digest_of(models / "tiny") if method != "from-scratch" else None
    if digest is None:
        with pytest.raises(UsageError) as refused:
            CausalLanguageModel({"model": "tiny", "method": method})
        digest = str(refused.value).rpartition('digest = "')[2].rstrip('"')
    return {"model": "tiny", "digest": digest, "sequence_length": 32, "data_bytes": 1 << 16, **more}


def test_volunteers_of_one_process_that_build_the_model_at_once_get_the_same_values(models: Path) -> None:
    """Regression: transformers and torch keep the default device and the seed per process. One volunteer got
    a model without values, or other values than the peers that it trains with.
    """
    settings = settings_of(models)

    def built(_: int) -> list[torch.Tensor]:
        return list(make_task("causal-lm", settings).build_model(5).parameters())

    first, *others = ThreadPoolExecutor(4).map(built, range(12))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("method", ["lora", "full", "from-scratch"])
def test_each_method_learns_and_exports_what_the_ecosystem_loads(
    models: Path, texts: Path, tmp_path: Path, method: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    task = make_task("causal-lm", settings_of(models, method=method))
    model, data = task.build_model(3), task.load_data(texts, CPU)
    described = task.describe(2)
    trained = [one for one in model.parameters() if one.requires_grad]
    assert described.parameters == sum(one.numel() for one in trained)
    assert sorted(described.shapes) == sorted(tuple(one.shape) for one in trained)
    before = data.validation_loss(model)
    assert data.metrics(before)["perplexity"] == pytest.approx(math.exp(before))  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        data.loss(model, 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = data.validation_loss(model)
    assert after < before - 0.15
    task.export(model, tmp_path / "out")  # type: ignore[attr-defined]
    if method == "lora":
        base = AutoModelForCausalLM.from_pretrained(models / "tiny", local_files_only=True)
        loaded = PeftModel.from_pretrained(base, tmp_path / "out")
        assert (
            json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
            == "tiny"
        )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert data.validation_loss(loaded) == pytest.approx(after, rel=1e-5)
    assert not [one for one in (tmp_path / "out").iterdir() if one.suffix in (".bin", ".pt", ".pkl", ".py")]


def test_same_seed_gives_the_same_model_on_every_machine(models: Path) -> None:
    for method in ("lora", "from-scratch"):
        task = make_task("causal-lm", settings_of(models, method=method))
        first, second, other = (task.build_model(seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)


def data_of(models: Path, texts: Path, **more: Any) -> TextData:
    task = CausalLanguageModel(settings_of(models, **more))
    data = task.load_data(texts, CPU)
    assert isinstance(data, TextData)
    return data


def test_peers_of_an_epoch_draw_disjoint_samples(models: Path, texts: Path) -> None:
    shares = []
    for own in PEERS:
        data = data_of(models, texts)
        data.start_epoch(swarm.Draw("run", 4, own, tuple(peer for peer in PEERS if peer != own)))
        shares.append(set(data.next_samples(len(data.share)).tolist()))
    assert not shares[0] & shares[1]
    assert not shares[0] & shares[2]
    assert not shares[1] & shares[2]
    whole = data_of(models, texts)
    whole.start_epoch(swarm.Draw("run", 4, PEERS[0]))
    assert set.union(*shares) == set(whole.next_samples(len(whole.share)).tolist())


def test_a_share_is_drawn_again_after_its_last_sample_and_differs_by_epoch(models: Path, texts: Path) -> None:
    data = data_of(models, texts)
    data.start_epoch(swarm.Draw("run", 1, PEERS[0], tuple(PEERS[1:])))
    share = len(data.share)
    first = data.next_samples(2 * share).tolist()
    assert sorted(first[:share]) == sorted(first[share:])
    data.start_epoch(swarm.Draw("run", 1, PEERS[0], tuple(PEERS[1:])))
    assert data.next_samples(2 * share).tolist() == first
    data.start_epoch(swarm.Draw("run", 2, PEERS[0], tuple(PEERS[1:])))
    assert data.next_samples(share).tolist() != first[:share]


def test_without_packing_a_sample_is_the_beginning_of_one_document(models: Path, texts: Path) -> None:
    (texts / "numbers.jsonl").write_text("\n".join(json.dumps({"text": f"{n} is short"}) for n in range(40)))
    data = data_of(models, texts, packing=False)
    model = make_task("causal-lm", settings_of(models)).build_model(0)
    assert torch.isfinite(data.loss(model, 4))
    assert set(data.training[:, -1].tolist()) == {-100}


def test_checkpointing_and_bfloat16_give_nearly_the_same_loss(models: Path, texts: Path) -> None:
    losses = []
    for more in ({}, {"gradient_checkpointing": True}, {"precision": "bfloat16"}):
        model = make_task("causal-lm", settings_of(models, **more)).build_model(0)
        loss = data_of(models, texts, **more).loss(model, 4)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-2)


def test_model_writes_a_sample_now_and_then(models: Path, texts: Path) -> None:
    data = data_of(models, texts, sample_every_epochs=5, prompt="7 times")
    model = make_task("causal-lm", settings_of(models)).build_model(0).eval()
    assert data.write_sample(model, 1).startswith("7 times")
    assert not data.write_sample(model, 5)
    assert data.write_sample(model, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "../secret"},
        {"model": "/etc/passwd"},
        {"model": "a/b/c"},
        {"model": "owner/name"},
        {"model": "owner/name", "revision": "main"},
        {"model": "tiny", "trust_remote_code": True},
        {"model": "tiny", "data": "owner/set"},
        {"model": "tiny", "data": "../x", "data_revision": COMMIT},
        {"model": "tiny", "split": "../x"},
        {"model": "tiny", "sequence_length": 10**9},
        {"model": "tiny", "lora": {"targets": [".*("]}},
    ],
    ids=str,
)
def test_settings_of_a_stranger_are_refused(models: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"task\.settings"):
        CausalLanguageModel({"digest": "0" * 64, **wrong})


def test_a_folder_with_other_files_than_the_run_names_is_refused(models: Path) -> None:
    settings = settings_of(models)
    (models / "tiny" / "notes.txt").write_text("not of the model")
    CausalLanguageModel(settings)
    with (models / "tiny" / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(UsageError, match="are not those of the run"):
        CausalLanguageModel(settings)
    shutil.rmtree(models / "tiny")
    with pytest.raises(UsageError, match="put its files into"):
        CausalLanguageModel(settings)


@pytest.mark.parametrize(
    ("file", "table"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "evil--Config"}}),
        ("config.json", {"num_hidden_layers": 10**6}),
        ("config.json", {"model_type": "no such type"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil", None]}}),
        ("model.safetensors.index.json", {"weight_map": {"x": "../../evil.safetensors"}}),
        ("adapter_config.json", {"base_model_name_or_path": "evil/model"}),
    ],
)
def test_models_that_need_code_or_files_elsewhere_are_refused(
    models: Path, file: str, table: dict[str, Any]
) -> None:
    path = models / "tiny" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | table))
    with pytest.raises(UsageError):
        CausalLanguageModel(settings_of(models)).describe(1)


def test_pickled_weights_are_never_read(models: Path) -> None:
    torch.save({}, models / "tiny" / "pytorch_model.bin")
    (models / "tiny" / "model.safetensors").unlink()
    task = make_task("causal-lm", settings_of(models))
    with pytest.raises(SwarmError, match="the task 'causal-lm' failed in build_model"):
        task.build_model(0)


@pytest.fixture
def hub(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the hub: it has one model, whose files are those of the tiny one."""

    def info(self: object, name: str, **options: Any) -> SimpleNamespace:
        if name != "owner/tiny":
            raise OSError("404: no such repository\nlonger text")
        files = [
            SimpleNamespace(
                rfilename=one.name,
                size=one.stat().st_size,
                lfs={"sha256": hashlib.sha256(one.read_bytes()).hexdigest()}
                if one.suffix == ".safetensors"
                else None,
                blob_id=hashlib.sha1(f"blob {one.stat().st_size}\0".encode() + one.read_bytes()).hexdigest(),
            )
            for one in made.iterdir()
        ]
        files.append(SimpleNamespace(rfilename="../../evil.json", size=1, lfs=None, blob_id=""))
        return SimpleNamespace(sha=options["revision"], siblings=files, card_data={"license": "apache-2.0"})

    def download(repository: str, name: str, *, tqdm_class: Any, **options: Any) -> str:
        size = (made / name).stat().st_size
        with tqdm_class(total=size, desc=name, unit="B", disable=True) as bar:
            bar.update(size)
        return str(made / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return made


def test_a_download_from_the_hub_is_shown_like_all_work(
    hub: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swarm.core.working.SHOWN_AFTER_S", 0.0)
    told, shown = threading.Event(), list[Work]()

    def show(work: Work) -> None:
        shown.append(work)
        if work.total and work.what.startswith("downloading model.safetensors"):
            told.set()

    download = huggingface_hub.hf_hub_download

    def slow(repository: str, name: str, **options: Any) -> str:
        path = str(download(repository, name, **options))
        assert name != "model.safetensors" or told.wait(20)
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", slow)
    settings = {"model": "owner/tiny", "revision": COMMIT, "method": "lora", "sequence_length": 32}
    task = make_task("causal-lm", settings)
    with shown_by(show):
        task.build_model(0)
    size = (hub / "model.safetensors").stat().st_size
    assert any(
        (work.what, work.done, work.total, work.unit)
        == ("downloading model.safetensors of owner/tiny", size, size, "bytes")
        for work in shown
    )
    assert "model.safetensors" not in capsys.readouterr().err, "the library has no bar of its own"


def test_a_model_of_the_hub_is_described_before_it_is_downloaded_and_verified(
    hub: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "owner/tiny", "revision": COMMIT, "method": "lora", "sequence_length": 32}
    asked, download = list[str](), huggingface_hub.hf_hub_download

    def noted(repository: str, name: str, **options: Any) -> str:
        asked.append(name)
        return str(download(repository, name, **options))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", noted)
    task = make_task("causal-lm", settings)
    (text,) = task.describe(1).downloads
    assert set(asked) == {"config.json"}, "nothing else is downloaded before the volunteer agrees"
    assert re.fullmatch(r"owner/tiny: \d+ kB from the Hugging Face hub \(licence apache-2\.0\)", text), text
    assert task.build_model(0).peft_config
    damaged = models / "damaged"
    shutil.copytree(hub, damaged)
    (damaged / "model.safetensors").write_bytes(b"changed on the way")
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repository, name, **options: str(damaged / name)
    )
    with pytest.raises(SwarmError, match="does not have the hash"):
        make_task("causal-lm", settings).build_model(0)
    with pytest.raises(
        NetworkError, match=r"the hub could not be asked for owner/other.*404: no such repository$"
    ):
        make_task("causal-lm", {**settings, "model": "owner/other"})
