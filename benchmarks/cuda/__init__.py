"""A peer with a GPU: codecs compared with the device's memory, a round, training steps compared with plain
torch, state and experts served meanwhile.

Refuses where there is no CUDA device. Not yet run on one: the same programs are tested on the host at a tiny
size. With `SWARM_GPU_DEVICE=cpu` the section runs at that size on the host, to find errors in it; its figures
then mean nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from averaging.averager import Averager
from benchmarks.cuda.companion import HERE
from benchmarks.cuda.device import (
    allocated_bytes,
    chosen_device,
    device_name,
    finish,
    forget_peak,
    peak_bytes,
    pinned_bytes,
    seconds_of,
)
from benchmarks.cuda.model import TINY, Size
from benchmarks.cuda.serving import experts, state_to_newcomers
from benchmarks.cuda.steps import Steps, in_a_swarm_of_one, torch_alone, with_a_companion
from benchmarks.report import figure
from benchmarks.results import Aim, Row, Series
from swarm.compression import find, names
from swarm.node import Node

__all__ = ["TINY", "Size", "check", "rows"]

ALONE = "torch alone"
_STEPS_S = 18.0  # of one measurement of training steps
_ROUND_S = 60.0


def check() -> None:
    """NoEnvironment, in a sentence, unless torch sees a CUDA device or the host was asked for."""
    chosen_device()


def rows(
    say: Callable[[str], None], *, device: torch.device | None = None, size: Size | None = None
) -> Iterator[list[Row]]:
    """Yield the rows of the section, part by part as they are measured. `device` and `size` are those of this
    machine by default.
    """
    device = chosen_device() if device is None else device
    size = size or (Size() if device.type == "cuda" else TINY)
    for part in (_codec_rows, _round_rows, _step_rows, _state_rows, _expert_rows):
        started_s = time.monotonic()
        found = part(device, size)
        for row in found:
            beside = (
                f", {row.peer.name} {figure(row.peer.median, row.peer.unit)}" if row.peer is not None else ""
            )
            say(f"{row.workload}, {row.quantity}: {figure(row.ours.median, row.ours.unit)}{beside}")
        say(f"  ({time.monotonic() - started_s:.0f} s)")
        yield found


def _codec_rows(device: torch.device, size: Size) -> list[Row]:
    """Encoding and decoding on the device, compared with a copy of the same values within its memory."""
    values, target = torch.randn(size.elements, device=device), torch.empty(size.elements, device=device)
    copied = _rates(size, seconds_of(lambda: target.copy_(values), device, size.rounds))
    found = [_row(device, "copy", "copy within the device", "rate of float32", "GB/s", copied)]
    for name in names():
        codec = find(name)
        encoded = torch.empty(codec.encoded_bytes(size.elements), dtype=torch.uint8, device=device)
        writing = seconds_of(functools.partial(codec.write, values, encoded), device, size.rounds)
        reading = seconds_of(functools.partial(codec.decode, encoded, target), device, size.rounds)
        for what, seconds in (("encode", writing), ("decode", reading)):
            rates = _rates(size, seconds)
            found.append(
                _row(
                    device,
                    f"codec-{name}-{what}",
                    f"codec {name}, {what}",
                    "rate of float32",
                    "GB/s",
                    rates,
                    ("copy", copied),
                )
            )
    return found


def _rates(size: Size, seconds: Sequence[float]) -> list[float]:
    return [4e-9 * size.elements / one for one in seconds]


def _round_rows(device: torch.device, size: Size) -> list[Row]:
    """Two peers of this process over loopback, with tensors on the device and with the same on the host."""
    seconds: dict[torch.device, list[float]] = {}
    memory = (0, 0)
    with Node(listen=HERE) as first, Node(bootstrap=first.addresses, listen=HERE) as second:
        for where in dict.fromkeys((device, torch.device("cpu"))):
            seconds[where] = []
            with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
                tensors = [torch.randn(size.elements, device=where) for _ in range(2)]
                forget_peak(where)
                before, pinned = allocated_bytes(where), pinned_bytes()
                averagers = [
                    stack.enter_context(Averager(node, [tensor], name=f"round-{where.type}", codec="int8"))
                    for node, tensor in zip((first, second), tensors, strict=True)
                ]
                for _ in range(size.rounds + 1):
                    results = [
                        step.result(2 * _ROUND_S)
                        for step in [pool.submit(one.step, timeout_s=_ROUND_S) for one in averagers]
                    ]
                    if any(result.failed for result in results):
                        raise RuntimeError(f"a round failed: {results}")
                    finish(where)
                    seconds[where].append(max(result.seconds["total"] for result in results))
                if where == device:
                    memory = (peak_bytes(where) - before, pinned_bytes() - pinned)
    return [
        _row(
            device,
            "round",
            "round of two peers, int8",
            "whole step",
            "s",
            seconds[device][1:],
            ("the host", seconds[torch.device("cpu")][1:]),
        ),
        _row(
            device,
            "round-memory",
            "round of two peers, int8",
            "device memory beside the tensors, at most",
            "bytes",
            [memory[0] / 2],
        ),
        _row(device, "round-pinned", "round of two peers, int8", "pinned memory", "bytes", [memory[1] / 2]),
    ]


def _step_rows(device: torch.device, size: Size) -> list[Row]:
    plain, stepping = torch_alone(size, device), torch_alone(size, device, each_step=True)
    alone = in_a_swarm_of_one(size, device)
    delayed = with_a_companion(size, device, "delayed", deadline_s=_STEPS_S)
    apart = with_a_companion(size, device, "diloco", deadline_s=_STEPS_S, offload=True)
    title = f"training step, bfloat16 transformer of {plain.parameters / 1e6:.0f} million parameters"
    found = [
        _step_row(
            device,
            "step-accumulating",
            f"{title}, no other peer",
            alone.undisturbed_s,
            plain.undisturbed_s,
            alone,
        ),
        _step_row(
            device,
            "step-diloco-offload",
            f"{title}, mode diloco with offload",
            apart.undisturbed_s,
            stepping.undisturbed_s,
            apart,
        ),
    ]
    if delayed.during_s:
        row = _step_row(
            device,
            "step-delayed",
            f"{title}, during a delayed round of two peers",
            delayed.during_s,
            plain.undisturbed_s,
            delayed,
        )
        found.append(row)
    blocked = (("delayed", delayed), ("diloco-offload", apart))
    for mode, steps in blocked:
        if steps.landing_blocked_s:
            text = f"{title}, end of an epoch, {mode}"
            found.append(
                _row(device, f"landing-{mode}", text, "trainer held up in step", "s", steps.landing_blocked_s)
            )
    every = (("torch", plain), ("accumulating", alone), ("delayed", delayed), ("diloco-offload", apart))
    found += [
        _row(
            device,
            f"memory-{name}",
            f"{title}, {name}",
            "device memory, at most",
            "bytes",
            [steps.peak_bytes],
        )
        for name, steps in every
    ]
    return found


def _step_row(
    device: torch.device, slug: str, workload: str, ours: list[float], plain: list[float], steps: Steps
) -> Row:
    notes = [f"pinned {steps.pinned_bytes / 1e6:.0f} MB"]
    if steps.round_s:
        notes.append(f"rounds took {', '.join(f'{one:.2f}' for one in steps.round_s)} s")
    notes += sorted(set(steps.failures))[:3]
    return _row(
        device, slug, workload, "whole step", "s", ours, (ALONE, plain), limit_ratio=1.1, notes=tuple(notes)
    )


def _state_rows(device: torch.device, size: Size) -> list[Row]:
    served = state_to_newcomers(size, device, times=size.rounds)
    if served.wrong:
        raise RuntimeError(f"a newcomer's state is wrong: {served.wrong}")
    title = f"state of {4e-6 * size.state_elements:.0f} MB to a newcomer, beside training"
    rates = [one / 1e9 for one in served.bytes_per_s]
    return [
        _row(
            device,
            "state",
            title,
            "rate until every chunk is verified",
            "GB/s",
            rates,
            aim=Aim(of="ours", sense="at least", value=1.0),
        ),
        _row(
            device,
            "state-step",
            title,
            "training step meanwhile",
            "s",
            served.busy_s,
            ("undisturbed", served.quiet_s),
            limit_ratio=1.2,
        ),
    ]


def _expert_rows(device: torch.device, size: Size) -> list[Row]:
    called = experts(size, device)
    if called.failed:
        raise RuntimeError(f"{called.failed} calls of an expert failed: {called.failures}")
    title = f"ffn expert {size.expert_width}, bfloat16, {size.callers} callers of {size.call_samples} samples"
    notes = (f"{called.samples_per_batch:.0f} samples a batch",)
    return [
        _row(
            device,
            "experts",
            title,
            "forward and backward passes a second",
            "calls/s",
            [called.calls_per_s],
            notes=notes,
        ),
        _row(
            device,
            "experts-busy",
            title,
            "share of the time in which the server computes",
            "%",
            [100 * called.busy],
            aim=Aim(of="ours", sense="at least", value=60.0),
        ),
    ]


def _row(
    device: torch.device,
    slug: str,
    workload: str,
    quantity: str,
    unit: str,
    ours: Sequence[float],
    beside: tuple[str, Sequence[float]] | None = None,
    *,
    limit_ratio: float | None = None,
    aim: Aim | None = None,
    notes: tuple[str, ...] = (),
) -> Row:
    """`beside`: the name and the samples of what it is compared with; `limit_ratio`: how many times the
    other's median ours may be.
    """
    if limit_ratio is not None:
        aim = Aim(of="ours / peer", sense="at most", value=limit_ratio)
    peer = (
        Series(name=f"{beside[0]}: {quantity}", unit=unit, samples=tuple(beside[1]))
        if beside is not None
        else None
    )
    return Row(
        identifier=f"cuda-{slug}",
        workload=f"GPU: {workload}",
        quantity=quantity,
        ours=Series(name=f"swarm on {device_name(device)}: {quantity}", unit=unit, samples=tuple(ours)),
        peer=peer,
        aim=aim,
        shown="ours / peer",
        notes=notes,
    )
