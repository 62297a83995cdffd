"""Notices when something other than the run's scheduler changes the hyperparameters of the optimizer.

Every PyTorch loop with a schedule does this. In a swarm each peer would then have its own learning rate,
because peers make different numbers of steps, and newcomers would not receive it.
"""

from __future__ import annotations

from typing import Any

import torch

from swarm.core.errors import UsageError

_CURE = (
    "peers make different numbers of steps, so that their learning rates differ, and newcomers do not "
    "receive it: pass the schedule as swarm.Optimizer(…, scheduler=lambda inner: …), which steps it once "
    "per epoch on every peer"
)


class HyperparameterWatch:
    """Compares the hyperparameters of an optimizer with those that the swarm left there. It complains once
    about what may be meant, and refuses the schedule of somebody else.

    Numbers are compared. Of a tensor, torch's version counter is compared, which does not wait for its
    device.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, scheduled: bool) -> None:
        """Watch `inner`. `scheduled`: the run has a scheduler of its own."""
        self._inner, self._scheduled = inner, scheduled
        self._complained = False
        self.record()

    def record(self) -> None:
        """Record the present hyperparameters as correct: the swarm has just set them, or the caller has
        restored them.
        """
        self._known = self._present()

    def complaint(self, outer: torch.optim.Optimizer) -> str:
        """Return what changed the hyperparameters, and what to do instead, in one sentence; "" if nothing
        did, or when it was said before. `outer`: the optimizer around `inner`, to which a scheduler may
        be attached.

        Raises UsageError when a scheduler other than the run's is attached and has changed them: it makes
        this peer train with rates that no other peer has. One that keeps them, as a framework makes it for
        a constant rate, does no harm.
        """
        changed = self._present() != self._known
        foreign = _has_scheduler(outer) or (_has_scheduler(self._inner) and not self._scheduled)
        if changed and foreign:
            raise UsageError(f"a scheduler other than the run's has changed the learning rate; {_CURE}")
        if self._complained:
            return ""
        if changed:
            found = "a hyperparameter was changed by something other than the scheduler of the run"
        elif foreign:
            found = "a torch scheduler is attached to this optimizer"
        else:
            return ""
        self._complained = True
        return f"{found}; {_CURE}"

    def _present(self) -> list[Any]:
        return [
            (key, _comparable(value))
            for group in self._inner.param_groups
            for key, value in group.items()
            if key not in ("params", "initial_lr")  # a scheduler adds `initial_lr` when it is made
        ]


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return tuple(map(_comparable, value)) if isinstance(value, (list, tuple)) else value


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one of torch's schedulers is attached: it replaces `step` on the instance."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
