"""Events as sentences: for logs and pipes, and for the lines above a live view."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from swarm.cli.render.output import Output, printable
from swarm.run import events

_EPOCH_LINE_S = 1.0


class PlainOutput:
    """One line per event that a person wants in a log, of epochs at most one a second; no control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_epoch_s = float("-inf")

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.EpochDone):
            if time.monotonic() < self._next_epoch_s:
                return
            self._next_epoch_s = time.monotonic() + _EPOCH_LINE_S
        text = sentence(event)
        if text:
            self._stream.write(printable(text) + "\n")  # in one piece, as in JsonOutput
            self._stream.flush()

    def question(self, text: str) -> bool:
        return False


def sentence(event: events.Event) -> str:
    """What to tell about an event; empty for what only a live view shows."""
    match event:
        case events.Listening():
            return (
                f"peer {event.peer_id} listens at {event.addresses[0]}"
                if event.addresses
                else f"peer {event.peer_id} takes no calls"
            )
        case events.RunFound():
            return found(event)
        case events.Joined():
            return f"training on {event.device}, data: {event.data}\nothers join with: {event.join_line}"
        case events.StateDownloaded():
            donors = f"{event.donors} peer{'s' if event.donors != 1 else ''}"
            avoided = "".join(f"\navoided {peer}: {why}" for peer, why in event.avoided.items())
            return f"state of epoch {event.epoch}: {size(event.received_bytes)} from {donors} in {event.seconds:.2f} s{avoided}"
        case events.Saved():
            return f"epoch {event.epoch} is saved in {event.path} ({event.seconds:.1f} s)"
        case events.Paused():
            return f"paused{', still giving the state to others' if event.member else ''}: {event.reason}"
        case events.Resumed():
            return f"training again after {event.seconds:.0f} s"
        case events.RunChanged():
            restart = "; start again to follow the rest" if event.restart else ""
            return f"the owner changed the run (version {event.version}): {', '.join(event.changes) or 'settings of its training'}{restart}"
        case events.Contributed():
            return f"contributing since {event.start_s:.1f} s after the start (epoch {event.epoch})"
        case events.EpochDone():
            return epoch(event)
        case events.RoundFailed():
            return f"a round of epoch {event.epoch} failed and is repeated: {event.reason}"
        case events.Resynchronised():
            done = f"resynchronised with epoch {event.epoch}" if event.loaded else "not resynchronised"
            return f"{done} in {event.seconds:.2f} s: {event.reason}"
        case events.Notice() | events.Failed():
            return event.text
        case events.Finished():
            return finished(event)
    return ""


def found(event: events.RunFound) -> str:
    """What a volunteer is told before being asked."""
    first = "founded" if event.founded else "found"
    if event.traffic_bytes_per_hour is None:
        traffic = f"{size(event.round_bytes)} each way per epoch; the pace is not known yet"
    else:
        traffic = f"about {size(event.traffic_bytes_per_hour)} per hour each way ({size(event.round_bytes)} per epoch)"
    people = (
        "nobody trains it at the moment"
        if not event.peers
        else f"{event.peers} peer{'s' if event.peers > 1 else ''} training now"
    )
    memory = f"about {size(event.memory_bytes)}; {size(event.memory_free_bytes)} are free"
    if event.device_memory_bytes is not None:
        memory += f"; and about {size(event.device_memory_bytes)} of the CUDA device's own"
    return "\n".join(
        (
            f"{first} {event.name}@{event.run_id}, version {event.version}: {event.summary}",
            f"  model     {event.parameters:,} parameters; a sample is {event.sample}",
            f"  batch     {event.target_batch_size:,} samples of the whole swarm per epoch, {event.batch_size} in each step of a volunteer",
            f"  memory    {memory}",
            f"  traffic   {traffic}",
            f"  swarm     {people}",
        )
    )


def epoch(event: events.EpochDone) -> str:
    validation = f"  held out {event.validation_loss:.3f}" if event.validation_loss is not None else ""
    return (
        f"epoch {event.epoch}: loss {event.loss:.3f}{validation}  {event.samples_per_s:.0f} of {event.swarm_samples_per_s:.0f} samples/s"
        f"  {event.peers} peer{'s' if event.peers != 1 else ''}  sent {size(event.sent_bytes)}  round {event.round_s:.2f} s"
    )


def finished(event: events.Finished) -> str:
    loss = ""
    if event.loss_first is not None and event.loss_last is not None:
        loss = f" Loss {event.loss_first:.3f} -> {event.loss_last:.3f}."
    failed = f", {event.failed_rounds} failed" if event.failed_rounds else ""
    return (
        f"finished at epoch {event.epoch} after {event.seconds:.0f} s: {event.reason}.{loss} Contributed {event.samples:,} samples"
        f" in {event.rounds} rounds{failed}; sent {size(event.sent_bytes)}.{_memory(event)}"
    )


def _memory(event: events.Finished) -> str:
    """What memory was taken, beside the estimate that was told before."""
    if not event.memory_peak_bytes:
        return ""
    text = f" Memory: {size(event.memory_peak_bytes)} at the peak, {size(event.memory_bytes)} estimated"
    if event.device_memory_bytes:
        peak, reserved = size(event.device_memory_peak_bytes), size(event.device_memory_reserved_bytes)
        text += f"; of the CUDA device {peak} ({reserved} with torch's reserve), {size(event.device_memory_bytes)} estimated"
    return f"{text}."


def size(count: float) -> str:
    """Bytes for people, in decimal units as links and disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
