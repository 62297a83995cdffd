"""The callback for the Trainer of transformers, and for trainers derived from it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from averaging.optim.optimizer import Optimizer
from swarm.core.errors import UsageError
from swarm.frameworks.shared import SharedSchedule, begin, check_one_process, refuse_schedule, report_losses

__all__ = ["HuggingFaceCallback", "SharedSchedule"]


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a `transformers.Trainer` train together with a swarm:

        Trainer(…, optimizers=(opt, SharedSchedule(opt)), callbacks=[HuggingFaceCallback(opt)])

    It loads the swarm's state before the first step, also after `resume_from_checkpoint`, publishes the
    losses that the Trainer logs, and ends the training after `epochs` epochs of the swarm. When `train`
    returns, the peer stays in the run and serves its state to others until `optimizer` or its node is closed;
    `train` may be called again.

    Args:
        optimizer: The `swarm.Optimizer` that the Trainer uses.
        epochs: Epochs of the swarm after which the training ends; None: the Trainer's own limits apply.
    """

    def __init__(self, optimizer: Optimizer, *, epochs: int | None = None) -> None:
        self.optimizer, self.epochs = optimizer, epochs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise UsageError for a schedule of the Trainer's own, several processes or another batch size."""
        check_one_process(args.world_size)
        self._check_optimizer(kwargs["optimizer"])
        self._check_schedule(kwargs["lr_scheduler"], str(getattr(args, "lr_scheduler_type", "")))
        samples = args.train_batch_size * args.gradient_accumulation_steps
        if self.optimizer.batch_size_per_step != samples:
            raise UsageError(
                f"one step of the Trainer has {samples} samples, and the swarm.Optimizer counts "
                f"{self.optimizer.batch_size_per_step}: make it with batch_size_per_step={samples}"
            )
        begin(self.optimizer)

    def _check_optimizer(self, used: Any) -> None:
        if getattr(used, "optimizer", used) is not self.optimizer:
            raise UsageError(
                "the Trainer and its callback have different optimizers: pass optimizers=(opt, "
                "SharedSchedule(opt)) to it"
            )

    def _check_schedule(self, used: Any, kind: str) -> None:
        if isinstance(used, SharedSchedule):
            return
        if kind.rpartition(".")[2].lower() != "constant" or self.optimizer.scheduler is not None:
            raise refuse_schedule(
                f"the Trainer's schedule ({type(used).__name__})",
                "pass optimizers=(opt, SharedSchedule(opt)) to the Trainer",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training when the swarm has completed `epochs` epochs."""
        if self.epochs is not None and self.optimizer.epoch >= self.epochs:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Publish the losses of the Trainer's log."""
        logs = logs or {}
        report_losses(self.optimizer, logs.get("loss"), logs.get("eval_loss"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting as a peer that trains."""
        self.optimizer.pause(True)
