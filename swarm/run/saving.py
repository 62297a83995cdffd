"""A volunteer's checkpoints: written now and then in a thread of their own, beside training, and gone on from
after a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.device import first_line, is_device_failure, is_out_of_memory
from swarm.core.errors import PeerError, SwarmError
from swarm.run.events import Emit, Notice, Saved

if TYPE_CHECKING:
    from averaging.optim.optimizer import Optimizer
    from averaging.optim.state.view import StateView

# a command that leaves waits no longer for the disk: of a large model the last checkpoint stays
_FINAL_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, and how often."""

    folder: Path  # of this run
    every_s: float = 600.0  # 0: never
    kept_max: int = 3
    resume: bool = False  # go on from the newest good one


class Saver:
    """On the trainer's thread, but for the writing."""

    def __init__(
        self, config: CheckpointConfig, parameters: Sequence[str], about: dict[str, str], emit: Emit
    ) -> None:
        """`parameters`: the model's names, in the optimizer's order. `about`: what the files say of their
        origin.
        """
        from averaging.optim.state.checkpoint import Checkpoints

        self._config, self._parameters, self._about, self._emit = config, parameters, about, emit
        self._kept = Checkpoints(config.folder, kept_max=config.kept_max)
        self._writing: threading.Thread | None = None
        self._next_s = time.monotonic() + config.every_s
        self._epoch = -1  # of the last one
        self._took_s = 0.0

    def resume(self, optimizer: Optimizer) -> bool:
        """Take over the newest checkpoint that is whole and fits; False when there is none. What is passed
        over is told.
        """
        checkpoint, wrong = self._kept.newest_good()
        for text in wrong:
            self._emit(Notice(text=f"passed over: {text}"))
        if checkpoint is None:
            self._emit(Notice(text=f"there is no checkpoint to resume from in {self._config.folder}"))
            return False
        try:
            optimizer.load_state(checkpoint.blob)
        except PeerError as error:
            raise SwarmError(
                f"the checkpoint {checkpoint.path} is not of this run as it is now: {error}"
            ) from error
        self._epoch = checkpoint.epoch
        self._emit(Notice(text=f"going on from epoch {checkpoint.epoch}, as saved in {checkpoint.path}"))
        return True

    def begins_anew(self) -> None:
        """The run starts from its first parameters: checkpoints of an earlier course are not mixed with its
        own.
        """
        aside = self._kept.archive()
        if aside is not None:
            self._emit(
                Notice(
                    text=f"beginning anew; earlier checkpoints are kept in {aside} (--resume would have gone on from them)"
                )
            )

    def after_epoch(self, optimizer: Optimizer) -> None:
        """An epoch is complete: write a checkpoint if it is time for one and the last one is written."""
        if self._config.every_s and time.monotonic() >= self._next_s and not self._busy():
            self._next_s = time.monotonic() + self._config.every_s
            self._start(optimizer)

    def close(self, optimizer: Optimizer) -> None:
        """Training ends: a last checkpoint, if the disk is quick enough for that."""
        if self._writing is not None:
            self._writing.join(_FINAL_S_MAX)
        if (
            self._config.every_s
            and optimizer.epoch not in (0, self._epoch)
            and not self._busy()
            and self._took_s < _FINAL_S_MAX
        ):
            self._start(optimizer)
            if self._writing is not None:
                self._writing.join(_FINAL_S_MAX)

    def _busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _start(self, optimizer: Optimizer) -> None:
        view = optimizer.state_view()
        self._epoch = view.epoch
        self._writing = threading.Thread(
            target=self._write, args=(view,), name="writes a checkpoint", daemon=True
        )
        self._writing.start()

    def _write(self, view: StateView) -> None:
        began_s = time.monotonic()
        try:
            path = self._kept.save(view, self._parameters, self._about)
        except SwarmError as error:
            self._emit(Notice(text=f"{error}; training goes on"))
        except (RuntimeError, MemoryError) as error:
            if not (is_device_failure(error) or is_out_of_memory(error)):
                raise
            self._emit(
                Notice(text=f"the checkpoint of epoch {view.epoch} was not written: {first_line(error)}")
            )
        else:
            self._took_s = time.monotonic() - began_s
            self._emit(Saved(epoch=view.epoch, path=str(path), seconds=self._took_s))
        finally:
            view.close()
