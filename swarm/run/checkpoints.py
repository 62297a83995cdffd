"""Checkpoints of a volunteer: written periodically in a background thread, and loaded after a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.device import first_line, is_device_failure, is_out_of_memory
from swarm.core.errors import PeerError, SwarmError
from swarm.core.working import working
from swarm.run.events import Emit, Notice, Saved

if TYPE_CHECKING:
    from averaging.optim.optimizer import Optimizer
    from averaging.optim.state.view import StateView

# A command that is asked to end waits this long for a last checkpoint. If the disk is slower, the last
# periodic one remains.
_FINAL_S_MAX = 1.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Folder and interval of checkpoints."""

    folder: Path  # folder of this run
    every_s: float = 600.0  # 0: never
    kept_max: int = 3
    from_scratch: bool = False  # ignore stored checkpoints, even if no peer has a state


class CheckpointWriter:
    """Resumes and writes the checkpoints of one run. Call it on the trainer's thread; files are written in
    another thread.
    """

    def __init__(
        self, config: CheckpointConfig, parameters: Sequence[str], about: dict[str, str], emit: Emit
    ) -> None:
        """`parameters`: the names of the model's parameters, in the optimizer's order. `about`: metadata of
        the files.
        """
        from averaging.optim.state.checkpoint import Checkpoints

        self._config, self._parameters, self._about, self._emit = config, parameters, about, emit
        self._checkpoints = Checkpoints(config.folder, kept_max=config.kept_max)
        self._writing: threading.Thread | None = None
        self._next_s = time.monotonic() + config.every_s
        self._epoch = -1  # epoch of the last complete checkpoint
        self._write_s = 0.0  # duration of the last write
        self._is_last = False  # the volunteer leaves

    def resume(self, optimizer: Optimizer) -> bool:
        """Load the newest valid checkpoint, because no peer has a state. Return False if there is none that
        fits this run.

        Emits a notice of what was loaded, and of each file that was skipped.
        """
        if self._config.from_scratch:
            return False
        with working("reading this machine's checkpoint"):
            checkpoint, wrong = self._checkpoints.newest_good()
        for text in wrong:
            self._emit(Notice(text=f"skipped: {text}"))
        if checkpoint is None or checkpoint.epoch == 0:
            return False
        try:
            optimizer.load_state(checkpoint.blob)
        except PeerError as error:
            text = f"the checkpoint {checkpoint.path} is not of this run as it is now: {error}"
            self._emit(Notice(text=text))
            return False
        self._epoch = checkpoint.epoch
        text = (
            f"nobody else has a state of this run: training continues from epoch {checkpoint.epoch}, "
            f"as saved in {checkpoint.path} (--from-scratch would start from the initial parameters)"
        )
        self._emit(Notice(text=text))
        return True

    def start_over(self) -> None:
        """Move earlier checkpoints to another folder, because the run starts from its initial parameters."""
        aside = self._checkpoints.archive()
        if aside is not None:
            self._emit(Notice(text=f"starting over; earlier checkpoints are kept in {aside}"))

    def follow(self, optimizer: Optimizer) -> None:
        """Move the checkpoints to another folder if the newest belongs to another history than the state that
        was downloaded from the other peers: their checkpoints must not replace this machine's.
        """
        newest = self._checkpoints.newest_epoch()
        if newest is None or not (newest > optimizer.epoch or self._is_of_other_history(optimizer)):
            return
        aside = self._checkpoints.archive()
        text = (
            f"the others are in epoch {optimizer.epoch} of another history of this run than this machine's "
            f"checkpoint of epoch {newest}: following them; earlier checkpoints are kept in {aside}"
        )
        self._emit(Notice(text=text))

    def _is_of_other_history(self, optimizer: Optimizer) -> bool:
        """Return whether the newest checkpoint is not in the history of the optimizer's state."""
        from averaging.optim.state.checkpoint import is_of_other_history, root_of_file
        from averaging.optim.state.training_state import past_of_header

        saved = root_of_file(self._checkpoints.newest_first()[0])
        view = optimizer.state_view()
        try:
            past = past_of_header(view.header)
        finally:
            view.close()
        return saved is not None and past is not None and is_of_other_history(saved, past)

    def after_epoch(self, optimizer: Optimizer) -> None:
        """Start to write a checkpoint if one is due and the last one is written."""
        if self._config.every_s and time.monotonic() >= self._next_s and not self._busy():
            self._next_s = time.monotonic() + self._config.every_s
            self._start(optimizer)

    def before_reunion(self, optimizer: Optimizer) -> None:
        """Save the state of the epochs that this peer made while it was cut off, before it gives them up. The
        file names its history, so that checkpoints of the other history do not replace it.
        """
        if self._writing is not None:
            self._writing.join(_FINAL_S_MAX)
        if not self._busy():
            self._start(optimizer)
            text = (
                f"epoch {optimizer.epoch} of this machine is saved first: the other peers continue from "
                "another history"
            )
            self._emit(Notice(text=text))

    def close(self, optimizer: Optimizer, stop: threading.Event) -> None:
        """Write a last checkpoint, and wait until it is written. Once `stop` is set, because somebody wants
        this process to end, this waits for a second at most, and begins none if an earlier one took longer.
        """
        self._is_last = True
        self._wait(stop)
        if not self._config.every_s or optimizer.epoch == 0:
            return
        is_slow = self._busy()
        if not is_slow and optimizer.epoch != self._epoch:
            is_slow = stop.is_set() and self._write_s >= _FINAL_S_MAX
            if not is_slow:
                self._start(optimizer)
                self._wait(stop)
                is_slow = self._busy()
        if is_slow:
            newest = self._checkpoints.newest_epoch()
            kept = (
                f"the newest checkpoint is of epoch {newest}" if newest is not None else "there is none yet"
            )
            text = (
                f"epoch {optimizer.epoch} is not saved: a checkpoint takes this machine longer than "
                f"{_FINAL_S_MAX:g} s; {kept}"
            )
            self._emit(Notice(text=text))

    def _wait(self, stop: threading.Event) -> None:
        """Wait until the file that is being written is complete; once `stop` is set, for a second at most."""
        while self._busy() and not stop.is_set():
            assert self._writing is not None
            self._writing.join(_POLL_S)
        if self._writing is not None:
            self._writing.join(_FINAL_S_MAX)

    def _busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _start(self, optimizer: Optimizer) -> None:
        view = optimizer.state_view()
        self._writing = threading.Thread(
            target=self._write, args=(view,), name="writes a checkpoint", daemon=True
        )
        self._writing.start()

    def _write(self, view: StateView) -> None:
        began_s = time.monotonic()
        try:
            with working(f"saving epoch {view.epoch}"):
                path = self._checkpoints.save(view, self._parameters, self._about)
        except SwarmError as error:
            self._emit(Notice(text=f"{error}" if self._is_last else f"{error}; training continues"))
        except (RuntimeError, MemoryError) as error:
            if not (is_device_failure(error) or is_out_of_memory(error)):
                raise
            self._emit(
                Notice(text=f"the checkpoint of epoch {view.epoch} was not written: {first_line(error)}")
            )
        else:
            self._epoch, self._write_s = view.epoch, time.monotonic() - began_s
            self._emit(Saved(epoch=view.epoch, path=str(path), seconds=self._write_s))
        finally:
            view.close()
