"""The Trainer of transformers, Accelerate and Lightning together with a peer with a plain loop: both hold the
same bits. Training resumes from the checkpoints of the frameworks, and a schedule is shared or refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra trainer")
pytest.importorskip("accelerate", reason="needs the extra trainer")
pytest.importorskip("lightning", reason="needs the extra lightning")

import lightning
import transformers
from accelerate import Accelerator

from averaging.optim.optimizer import Optimizer
from swarm.core.errors import UsageError
from swarm.frameworks.hugging_face import HuggingFaceCallback
from swarm.frameworks.lightning_fit import LightningCallback
from swarm.frameworks.shared import SharedSchedule
from swarm.node import Node
from tests.wire.trainers import BATCH, LOCAL, QUICK, TARGET, Peer, adam, batch, build, halving, swarm_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

EPOCHS = 4
OPTIONS: dict[str, Any] = {
    "target_batch_size": TARGET,
    "batch_size_per_step": BATCH,
    "codec": "float32",
    "config": QUICK,
    "state_sync_epochs": 0,
}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that no peer with a plain loop has."""

    def __init__(self) -> None:
        self.x, self.y = batch(77, 4000)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class WithLoss(torch.nn.Module):
    """A model as the Trainer expects it: it computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[None]:
    """Run a function in a thread, and wait for its end."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(90.0)
    assert not errors, errors
    assert not thread.is_alive(), "the plain peer hangs"


@contextmanager
def second_node(peer: Peer) -> Iterator[Node]:
    with Node(peer.node.addresses, "127.0.0.1:0", config=LOCAL) as node:
        yield node


@pytest.fixture
def optimizer_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Optimizer]]:
    """Return what makes the optimizer of a peer that is alone, unless it is given a node."""
    with ExitStack() as stack:

        def make(net: torch.nn.Module, node: Node | None = None, **more: Any) -> Optimizer:
            node = node or stack.enter_context(Node(listen="127.0.0.1:0", config=LOCAL))
            options = {"run": request.node.name, **OPTIONS, **more}
            return stack.enter_context(Optimizer(adam(net), node=node, **options))

        yield make


# --- transformers


def trainer_of(
    folder: Path, model: torch.nn.Module, opt: Optimizer, epochs: int, schedule: Any = None, **more: Any
) -> transformers.Trainer:
    options = {
        "max_steps": 100_000,
        "per_device_train_batch_size": BATCH,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        **more,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **options),
        train_dataset=Samples(),
        optimizers=(opt, schedule or SharedSchedule(opt)),
        callbacks=[HuggingFaceCallback(opt, epochs=epochs)],
    )


def test_trainer_of_transformers_and_a_plain_peer_train_one_model(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    with swarm_of(1, "transformers") as [plain], second_node(plain) as node:
        model = WithLoss()
        plain.train_to(1)  # the Trainer comes late and loads this
        opt = optimizer_of(model.net, node, run="transformers", scheduler=halving)
        trainer = trainer_of(tmp_path, model, opt, EPOCHS)
        with in_background(lambda: plain.train_to(EPOCHS)):
            trainer.train()
        assert opt.state_digest() == plain.opt.state_digest()
        assert opt.param_groups[0]["lr"] == plain.opt.param_groups[0]["lr"] == 0.01 / 4
        together = [one for one in plain.reports if one.round is not None and not one.round.failed]
        assert together, "they have averaged"
        plain.train_to(EPOCHS + 1)  # a Trainer that has finished keeps nobody waiting
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        assert rates, "the Trainer logs the swarm's rate"
        assert set(rates) <= {0.01, 0.005, 0.0025}


def test_trainer_of_transformers_resumes_from_its_checkpoint(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    whole = WithLoss()
    trainer_of(tmp_path, whole, optimizer_of(whole.net, scheduler=halving), EPOCHS).train()
    steps = TARGET // BATCH + 3  # in the middle of an epoch
    first = WithLoss()
    saving = {"save_strategy": "steps", "save_steps": steps, "max_steps": steps}
    trainer_of(tmp_path, first, optimizer_of(first.net, scheduler=halving), EPOCHS, **saving).train()
    second = WithLoss()
    opt = optimizer_of(second.net, scheduler=halving)
    trainer_of(tmp_path, second, opt, EPOCHS).train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}")
    )
    assert opt.epoch == EPOCHS
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_trainer_of_transformers_trains_again_with_the_same_optimizer(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    model = WithLoss()
    opt = optimizer_of(model.net)
    for epochs in (2, 3):
        trainer_of(tmp_path, model, opt, epochs).train()
        assert opt.epoch == epochs


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_schedule_of_the_trainers_own_is_refused(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer], kind: str
) -> None:
    model = WithLoss()
    trainer = trainer_of(tmp_path, model, optimizer_of(model.net), 2, lr_scheduler_type=kind)
    trainer.lr_scheduler = None  # as with optimizers=(opt, None)
    with pytest.raises(UsageError, match=r"SharedSchedule\(opt\)"):
        trainer.train()


def test_constant_rate_of_the_trainer_is_allowed_unless_the_run_has_a_schedule(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    for scheduler in (None, halving):
        model = WithLoss()
        opt = optimizer_of(model.net, scheduler=scheduler)
        trainer = trainer_of(tmp_path, model, opt, 2, lr_scheduler_type="constant")
        trainer.lr_scheduler = None
        if scheduler is None:
            trainer.train()
            assert opt.epoch == 2
        else:
            with pytest.raises(UsageError, match="SharedSchedule"):
                trainer.train()


def test_another_batch_size_than_the_optimizer_counts_is_refused(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    model = WithLoss()
    trainer = trainer_of(tmp_path, model, optimizer_of(model.net), 2, gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match=f"batch_size_per_step={2 * BATCH}"):
        trainer.train()


def test_another_optimizer_than_the_callbacks_is_refused(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    model = WithLoss()
    trainer = trainer_of(tmp_path, model, optimizer_of(model.net), 2)
    trainer.optimizer = adam(model)
    with pytest.raises(UsageError, match="different optimizers"):
        trainer.train()


# --- accelerate


def test_accelerate_and_a_plain_peer_train_one_model(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with swarm_of(1, "accelerate") as [plain], second_node(plain) as node:
        loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH // 2)
        opt = optimizer_of(net := build(), node, run="accelerate", scheduler=halving)
        prepared, wrapped, batches = accelerator.prepare(net, opt, loader)
        opt.load_state_from_peers(timeout_s=30)
        plain.opt.wait_for_peers(1)

        def train(epochs: int) -> None:
            for one in batches:
                with accelerator.accumulate(prepared):
                    loss = (prepared(one["x"]) - one["labels"]).square().mean()
                    accelerator.backward(loss)
                    wrapped.step()
                    wrapped.zero_grad()
                if opt.epoch >= epochs:
                    return

        with in_background(lambda: plain.train_to(EPOCHS)):
            train(EPOCHS)
        assert opt.state_digest() == plain.opt.state_digest()
        assert any(one.round is not None and not one.round.failed for one in plain.reports)

        accelerator.save_state(str(tmp_path / "saved"))
        digest = opt.state_digest()
    net = build(seed=5)
    accelerator = Accelerator(cpu=True)
    opt = optimizer_of(net, scheduler=halving)
    accelerator.prepare(net, opt)
    accelerator.load_state(str(tmp_path / "saved"))
    assert opt.state_digest() == digest


def test_schedule_prepared_by_accelerate_is_refused(optimizer_of: Callable[..., Optimizer]) -> None:
    accelerator = Accelerator(cpu=True)
    opt = optimizer_of(net := build())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    prepared, wrapped, stepped = accelerator.prepare(net, opt, schedule)
    inputs, targets = batch(1, BATCH)
    accelerator.backward((prepared(inputs) - targets).square().mean())
    wrapped.step()
    stepped.step()
    with pytest.raises(UsageError, match="scheduler=lambda inner"):
        wrapped.step()


# --- lightning


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A module that returns an optimizer, and a scheduler if it is asked to."""

    def __init__(self, schedule: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        self.net, self.schedule, self.optimizer_count = build(), schedule, optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, one: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return (self.net(one["x"]) - one["labels"]).square().mean()

    def validation_step(self, one: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.training_step(one, index))

    def configure_optimizers(self) -> Any:
        inner = adam(self.net)
        if self.schedule:
            return [inner], [halving(inner)]
        return inner if self.optimizer_count == 1 else [adam(self.net) for _ in range(self.optimizer_count)]


def fit(folder: Path, module: Module, callback: LightningCallback, **more: Any) -> lightning.Trainer:
    from_checkpoint = more.pop("ckpt_path", None)
    options = {
        "max_steps": 100_000,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "val_check_interval": 10,
        "limit_val_batches": 1,
        "default_root_dir": folder,
        **more,
    }
    samples = torch.utils.data.Subset(Samples(), range(options.pop("samples", 4000)))
    trainer = lightning.Trainer(callbacks=[callback], **options)
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH)
    trainer.fit(module, loader, loader, ckpt_path=from_checkpoint)
    return trainer


@pytest.fixture
def alone() -> Iterator[Node]:
    with Node(listen="127.0.0.1:0", config=LOCAL) as node:
        yield node


def test_lightning_and_a_plain_peer_train_one_model_in_two_fits(tmp_path: Path) -> None:
    with swarm_of(1, "lightning") as [plain], second_node(plain) as node:
        module = Module()
        callback = LightningCallback(node, run="lightning", epochs=2, scheduler=halving, **OPTIONS)
        with in_background(lambda: plain.train_to(2)):
            fit(tmp_path, module, callback)
        assert callback.optimizer.state_digest() == plain.opt.state_digest()
        first = callback.optimizer
        longer = LightningCallback(node, run="lightning", epochs=EPOCHS, scheduler=halving, **OPTIONS)
        with pytest.raises(UsageError, match="already has an Optimizer"):
            fit(tmp_path, module, longer)
        callback.epochs = EPOCHS
        with in_background(lambda: plain.train_to(EPOCHS)):
            fit(tmp_path, module, callback)
        assert callback.optimizer is first
        assert callback.optimizer.state_digest() == plain.opt.state_digest()
        assert callback.optimizer.param_groups[0]["lr"] == 0.01 / 4
        assert any(one.round is not None and not one.round.failed for one in plain.reports)


def test_lightning_resumes_from_its_checkpoint(
    tmp_path: Path, optimizer_of: Callable[..., Optimizer]
) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(listen="127.0.0.1:0", config=LOCAL)) for _ in range(3)]

        def callback(number: int) -> LightningCallback:
            return LightningCallback(
                nodes[number], run=f"run {number}", epochs=EPOCHS, scheduler=halving, **OPTIONS
            )

        whole, first, second = Module(), Module(), Module()
        # one batch an epoch of Lightning, which does not return to the middle of a loader
        few = {"samples": BATCH, "val_check_interval": 1}
        fit(tmp_path, whole, callback(0), **few)
        trainer = fit(tmp_path, first, callback(1), max_steps=TARGET // BATCH + 3, **few)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        resumed = callback(2)
        fit(tmp_path, second, resumed, ckpt_path=tmp_path / "middle.ckpt", **few)
        assert resumed.optimizer.epoch == EPOCHS
        for one, other in zip(whole.parameters(), second.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def test_lightning_fits_another_module_in_the_same_run(tmp_path: Path, alone: Node) -> None:
    callback = LightningCallback(alone, run="modules", epochs=1, **OPTIONS)
    fit(tmp_path, Module(), callback)
    first = callback.optimizer
    fit(tmp_path, Module(), callback)
    assert callback.optimizer is not first
    assert first.closed


def test_scheduler_of_a_lightning_module_is_refused(tmp_path: Path, alone: Node) -> None:
    callback = LightningCallback(alone, run="refused", epochs=1, **OPTIONS)
    with pytest.raises(UsageError, match="scheduler=lambda inner"):
        fit(tmp_path, Module(schedule=True), callback)


def test_lightning_module_with_two_optimizers_is_refused(tmp_path: Path, alone: Node) -> None:
    callback = LightningCallback(alone, run="refused", epochs=1, **OPTIONS)
    with pytest.raises(UsageError, match="has 2 optimizers"):
        fit(tmp_path, Module(optimizers=2), callback)
