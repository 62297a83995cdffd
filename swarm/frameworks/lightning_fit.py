"""The callback for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback

from averaging.optim.optimizer import Optimizer
from swarm.core.errors import UsageError
from swarm.frameworks.shared import begin, check_one_process, refuse_schedule, report_losses
from swarm.node import Node


class LightningCallback(Callback):  # type: ignore[misc]
    """Lets a Lightning Trainer train together with a swarm:

        Trainer(…, callbacks=[LightningCallback(node, run="my-run", target_batch_size=512,
                                                batch_size_per_step=32)])

    It wraps the optimizer that `configure_optimizers` returns in a swarm.Optimizer. The attribute `optimizer`
    is this object; later calls of `fit` with the same module use it again. The callback loads the swarm's
    state before the first step, also after `ckpt_path`, publishes the loss and the metric `val_loss`, and
    ends `fit` after `epochs` epochs of the swarm. After `fit` the peer stays in the run and serves its state
    to others until `optimizer` or the node is closed.

    Args:
        node: This process as a peer.
        run: Name or id of the run.
        target_batch_size: Samples of the whole swarm in one epoch.
        batch_size_per_step: Samples of one step of this peer.
        epochs: Epochs of the swarm after which `fit` ends; None: the Trainer's own limits apply.
        options: Further arguments of `swarm.Optimizer`.
    """

    def __init__(
        self,
        node: Node,
        *,
        run: str,
        target_batch_size: int,
        batch_size_per_step: int,
        epochs: int | None = None,
        **options: Any,
    ) -> None:
        self._node, self.epochs = node, epochs
        self._options = {
            "run": run,
            "target_batch_size": target_batch_size,
            "batch_size_per_step": batch_size_per_step,
            **options,
        }
        self._made: Optimizer | None = None

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of the current or the last `fit`. Raise UsageError before the first one."""
        if self._made is None:
            raise UsageError("there is no swarm.Optimizer before fit has begun")
        return self._made

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the module's optimizer in a swarm.Optimizer, before a checkpoint is loaded into it.

        Raises UsageError for several optimizers, several processes or a schedule of the module's own.
        """
        check_one_process(trainer.world_size)
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"the module has {len(trainer.optimizers)} optimizers, and a run has one: let "
                "configure_optimizers return one torch optimizer"
            )
        if trainer.lr_scheduler_configs:
            raise refuse_schedule(
                "the scheduler that configure_optimizers returns",
                "return the optimizer alone, and pass scheduler=lambda inner: … to the LightningCallback",
            )
        trainer.strategy.optimizers = [self._wrapped(trainer.optimizers[0])]

    def _wrapped(self, inner: torch.optim.Optimizer) -> Optimizer:
        made = self._made
        if made is not None and not made.closed:
            if _parameters(made.inner) == _parameters(inner):
                # After the last fit Lightning moved the statistics to the host; loading moves them back
                made.inner.load_state_dict(made.inner.state_dict())
                return made
            made.close()  # it belongs to another module
        self._made = Optimizer(inner, node=self._node, **self._options)
        return self._made

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the swarm's state if it is ahead."""
        begin(self.optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publish the loss as often as Lightning logs; end `fit` when the swarm has completed `epochs`
        epochs.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            report_losses(self.optimizer, loss, None)
        if self.epochs is not None and self.optimizer.epoch >= self.epochs:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the metric `val_loss`, if the module logs it."""
        if self._made is not None and not trainer.sanity_checking:
            report_losses(self._made, None, trainer.callback_metrics.get("val_loss"))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop counting as a peer that trains."""
        self.optimizer.pause(True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop counting as a peer that trains, after an error as well."""
        if self._made is not None and not self._made.closed:
            self._made.pause(True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the identities of an optimizer's parameters."""
    return [id(one) for group in optimizer.param_groups for one in group["params"]]
