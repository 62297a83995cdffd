"""Presentation of a volunteer (`swarm start`, `swarm join`) and a peer that does not train."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swarm.cli.render.output import Presentation
from swarm.cli.render.text import sparkline
from swarm.core.wording import counted, duration, size
from swarm.dht.logic.blobs import version_text
from swarm.run import events

if TYPE_CHECKING:
    from rich.console import Group

    from swarm.run.contributions import Given

_EPOCH_LINE_S = 1.0  # shortest interval between the lines of two epochs in a log
_PROGRESS_LINE_S = 10.0  # the same within an epoch
_CONTRIBUTION_LINE_S = 600.0  # the same for contributions
_HISTORY_MAX = 10_000  # epochs in the graph of losses
_BAR = 30  # width in columns
_FOOTER = "Ctrl-C leaves; the others continue."


class VolunteerPresentation(Presentation):
    """Sentences for all events of a volunteer, and a table of its progress."""

    picture_events = (events.TrainingProgress, events.EpochDone, events.ContributionSums)
    final_events = (events.Finished,)

    def __init__(self) -> None:
        self._next_epoch_s = float("-inf")
        self._next_progress_s = time.monotonic() + _PROGRESS_LINE_S
        self._next_contribution_s = time.monotonic() + _CONTRIBUTION_LINE_S
        self._shown = False
        self._losses: list[float] = []
        self._validation: float | None = None
        self._last: events.EpochDone | None = None
        self._now: events.TrainingProgress | None = None
        self._target = 0
        self._sent = 0
        self._given: events.ContributionSums | None = None
        self._paused = ""

    def is_due(self, event: events.Event) -> bool:
        if isinstance(event, events.EpochDone):
            if time.monotonic() < self._next_epoch_s:
                return False
            self._next_epoch_s = time.monotonic() + _EPOCH_LINE_S
            self._next_progress_s = time.monotonic() + _PROGRESS_LINE_S
        if isinstance(event, events.TrainingProgress):
            if time.monotonic() < self._next_progress_s:
                return False
            self._next_progress_s = time.monotonic() + _PROGRESS_LINE_S
        if isinstance(event, events.ContributionSums):
            if time.monotonic() < self._next_contribution_s:
                return False
            self._next_contribution_s = time.monotonic() + _CONTRIBUTION_LINE_S
        return True

    def sentence(self, event: events.Event) -> str:
        match event:
            case events.RunFound():
                self._target = event.target_batch_size
                return _run_description(event)
            case events.Joined():
                others = f"\nothers join with: {event.join_line}" if event.join_line else ""
                return f"training on {event.device}, data: {event.data}{others}"
            case events.StateDownloaded():
                donors = counted(event.donors, "peer")
                avoided = "".join(f"\navoided {peer}: {why}" for peer, why in event.avoided.items())
                return (
                    f"state of epoch {event.epoch}: {size(event.received_bytes)} from {donors} "
                    f"in {event.seconds:.2f} s{avoided}"
                )
            case events.Saved():
                return f"epoch {event.epoch} is saved in {event.path} ({event.seconds:.1f} s)"
            case events.Paused():
                return (
                    f"paused{', still serving the state to others' if event.member else ''}: {event.reason}"
                )
            case events.Resumed():
                return f"training again after {event.seconds:.0f} s"
            case events.RunChanged():
                restart = "; start again to follow the rest" if event.restart else ""
                changes = ", ".join(event.changes) or "settings of its training"
                return (
                    f"the owner changed the run (version {version_text(event.version)}): {changes}{restart}"
                )
            case events.Contributed():
                return f"contributing since {event.start_s:.1f} s after the start (epoch {event.epoch})"
            case events.TrainingProgress():
                return _progress(event, self._target)
            case events.EpochDone():
                return _epoch(event)
            case events.ContributionSums():
                today, altogether = given(event.today), given(event.altogether)
                return f"this machine gave {today} today, and {altogether} to this run altogether"
            case events.TextSample():
                return f"epoch {event.epoch} writes: {event.text}"
            case events.RoundFailed():
                return f"a round of epoch {event.epoch} failed and is repeated: {event.reason}"
            case events.Resynchronised():
                done = f"resynchronised with epoch {event.epoch}" if event.loaded else "not resynchronised"
                return f"{done} in {event.seconds:.2f} s: {event.reason}"
            case events.Finished():
                return _finished(event)
        return super().sentence(event)

    def draw(self, event: events.Event) -> Group | None:
        match event:
            case events.RunFound():
                self._target = event.target_batch_size
            case events.Joined():
                self._shown = True
            case events.TrainingProgress():
                self._now = event
            case events.EpochDone():
                self._last, self._now = event, None
                self._losses = [*self._losses[-_HISTORY_MAX:], event.loss]
                self._validation = (
                    event.validation_loss if event.validation_loss is not None else self._validation
                )
                self._sent += event.sent_bytes
            case events.ContributionSums():
                self._given = event
            case events.Paused():
                self._paused = event.reason
            case events.Resumed():
                self._paused = ""
            case events.Finished():
                self._shown = False
        return self._picture() if self._shown else None

    def _picture(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        last, now = self._last, self._now
        if self._paused:
            return Group(Text(f"paused: {self._paused}", style="yellow"), Text(_FOOTER, style="dim"))
        if last is None and now is None:
            return Group(Text("waiting for the first epoch"))
        table = Table.grid(padding=(0, 2))
        epoch = now.epoch if now is not None else last.epoch if last is not None else 0
        rate, swarm_rate = (now.samples_per_s, now.swarm_samples_per_s) if now is not None else (0.0, 0.0)
        if now is None and last is not None:
            rate, swarm_rate = last.samples_per_s, last.swarm_samples_per_s
        filled = now.swarm_samples if now is not None else 0
        table.add_row(
            "epoch", f"{epoch:,}", ProgressBar(total=max(1, self._target), completed=filled, width=_BAR)
        )
        loss = f"{self._losses[-1]:.3f}" if self._losses else "-"
        held_out = f"held out {self._validation:.3f}" if self._validation is not None else ""
        table.add_row("loss", loss, Text(sparkline(self._losses, _BAR)), held_out)
        peers = now.peers if now is not None else last.peers if last is not None else 0
        table.add_row("samples/s", f"{rate:.0f}", f"{swarm_rate:.0f} by {counted(peers, 'peer')}")
        table.add_row(
            "sent", size(self._sent), f"last round {last.round_s:.2f} s" if last is not None else ""
        )
        if self._given is not None:
            table.add_row("given", "today", given(self._given.today))
            table.add_row("", "altogether", given(self._given.altogether))
        return Group(table, Text(_FOOTER, style="dim"))


_MEMBERS = {
    "invited": "invited: peers of the run answer only peers that joined by an invite",
    "open": "open: peers of the run answer everybody, so anybody with an address can join",
}


def _run_description(event: events.RunFound) -> str:
    """Return what a volunteer sees before it agrees to train."""
    # created, although the version is not 1: no peer of the swarm had the run any more
    created = "created" if event.version == 1 else "created again:"
    first = created if event.created else "joining"
    if event.traffic_bytes_per_hour is None:
        traffic = f"{size(event.round_bytes)} each way per epoch; the pace is not known yet"
    else:
        traffic = (
            f"about {size(event.traffic_bytes_per_hour)} per hour each way "
            f"({size(event.round_bytes)} per epoch)"
        )
    people = (
        "nobody trains it at the moment"
        if not event.peers
        else f"{counted(event.peers, 'peer')} training now"
    )
    memory = f"about {size(event.memory_bytes)}; {size(event.memory_free_bytes)} are free"
    if event.device_memory_bytes is not None:
        memory += f"; and about {size(event.device_memory_bytes)} of the CUDA device's own"
    return "\n".join(
        (
            f"{first} {event.name}@{event.run_id}, version {version_text(event.version)}: {event.summary}",
            f"  model     {event.parameters:,} parameters; a sample is {event.sample}",
            f"  batch     {event.target_batch_size:,} samples of the whole swarm per epoch, "
            f"{event.batch_size} in each step of a volunteer",
            f"  memory    {memory}",
            *(f"  download  {one}" for one in event.downloads),
            f"  members   {_MEMBERS[event.members]}",
            f"  traffic   {traffic}",
            f"  swarm     {people}",
            *(f"  pause     {one}" for one in event.pauses),
            *([f"  its owner says: {event.message}"] if event.message else []),
        )
    )


def given(sums: Given) -> str:
    """Return the contributions of a machine, and their traffic and energy."""
    energy = f", {sums.joules / 3.6e6:.2f} kWh" if sums.joules >= 3.6e4 else ""
    traffic = f"{size(sums.sent_bytes)} sent, {size(sums.received_bytes)} received"
    return f"{sums.samples:,} samples in {duration(sums.seconds)} ({traffic}{energy})"


def _progress(event: events.TrainingProgress, target: int) -> str:
    of_target = f" of {target:,}" if target else ""
    return (
        f"epoch {event.epoch + 1} so far: {event.swarm_samples:,}{of_target} samples by "
        f"{counted(event.peers, 'peer')}, loss {event.loss:.3f}"
    )


def _epoch(event: events.EpochDone) -> str:
    validation = f"  held out {event.validation_loss:.3f}" if event.validation_loss is not None else ""
    validation += "".join(f"  {name} {value:.4g}" for name, value in event.metrics.items())
    return (
        f"epoch {event.epoch}: loss {event.loss:.3f}{validation}"
        f"  {event.samples_per_s:.0f} of {event.swarm_samples_per_s:.0f} samples/s"
        f"  {counted(event.peers, 'peer')}"
        f"  sent {size(event.sent_bytes)}  round {event.round_s:.2f} s"
    )


def _finished(event: events.Finished) -> str:
    loss = ""
    if event.validation_first is not None and event.validation_loss is not None:
        loss = f" Held-out loss {event.validation_first:.3f} -> {event.validation_loss:.3f}."
    failed = f", {event.failed_rounds} failed" if event.failed_rounds else ""
    return (
        f"finished at epoch {event.epoch} after {event.seconds:.0f} s: {event.reason}.{loss}"
        f" Contributed {event.samples:,} samples in {event.rounds} rounds{failed};"
        f" sent {size(event.sent_bytes)}.{_memory(event)}"
    )


def _memory(event: events.Finished) -> str:
    """Return the measured memory and its estimate."""
    if not event.memory_peak_bytes:
        return ""
    text = f" Memory: {size(event.memory_peak_bytes)} at the peak, {size(event.memory_bytes)} estimated"
    if event.device_memory_bytes:
        peak, reserved = size(event.device_memory_peak_bytes), size(event.device_memory_reserved_bytes)
        text += (
            f"; of the CUDA device {peak} ({reserved} with torch's reserve), "
            f"{size(event.device_memory_bytes)} estimated"
        )
    return f"{text}."
