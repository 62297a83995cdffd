"""The part of `swarm.Optimizer` that belongs to the inner optimizer: groups, state and hooks, as in torch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from swarm.core.errors import UsageError


class DelegatingOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose groups, state and hooks are those of `inner`."""

    # torch's __init__ is not called: all that it would set is the inner optimizer's
    inner: torch.optim.Optimizer
    _closed: bool

    @property
    def closed(self) -> bool:
        """Return whether this peer has left the run."""
        return self._closed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`; gradients that `step` has taken are kept."""
        self.inner.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "peers agreed on the parameters when this optimizer was made: "
            "add groups to the inner optimizer before that"
        )

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Called when the inner optimizer steps, once an epoch: with the averaged gradients in `.grad`."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a swarm.Optimizer belongs to its node and cannot be copied or pickled: use state_dict()"
        )
