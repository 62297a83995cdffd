"""A measured system that is one launch of worker processes, as those of experts, mixtures and the DHT."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.launch import Launch
from benchmarks.measured_systems import READY_TIMEOUT_S


class LaunchedSystem:
    """The part of `benchmarks.measured_systems.MeasuredSystem` that opens and closes. Subclasses implement
    `round`.
    """

    def __init__(
        self,
        name: str,
        *,
        python: Path,
        module: str,
        configurations: Sequence[dict[str, Any]],
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """`module` is a module of `benchmarks.workers`, started once for each of `configurations`."""
        self._name, self._ready_timeout_s = name, ready_timeout_s
        self._launch = Launch(
            name, python=python, module=f"benchmarks.workers.{module}", configurations=list(configurations)
        )

    @property
    def name(self) -> str:
        return self._name

    def _prepare(self) -> None:
        """Do the work between the workers' readiness and the first round. Subclasses may override it."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._launch)
            self._launch.receive("ready", self._ready_timeout_s)
            self._prepare()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._launch.__exit__(*error)
