"""The systems that are measured, behind one interface: open, one round at a time in turn with the others,
close.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.bare_transport import BareButterfly
from benchmarks.launch import Launch, LaunchFailed
from swarm.compression import find
from swarm.testing.links import Links

START_AHEAD_S = 0.05
READY_TIMEOUT_S = 60.0
ROUND_TIMEOUT_S = 45.0
DELIVERED_MIN = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of one round of one system. Seconds count from the aligned start to the end of the slowest
    peer.
    """

    ok: bool  # every peer has the average of all peers in every element
    reason: str = ""
    wrong: bool = False  # the peers reported success, but the result is wrong
    whole_s: float = 0.0  # matchmaking included
    group_s: float | None = None  # until the last peer had its group; None: no such phase
    reduce_s: float = 0.0  # from the group to the end
    processor_s: float = 0.0
    delivered: float = 0.0
    # seconds of the slowest peer, as the system itself reports them
    phases: Mapping[str, float] = field(default_factory=dict)
    wire_bytes: int = 0  # IP packets of all peers, where links are emulated
    carried_bytes: int = 0  # their TCP payload


class MeasuredSystem(Protocol):
    """A system under measurement: a context manager whose rounds can take turns with those of others."""

    @property
    def name(self) -> str: ...
    def __enter__(self) -> MeasuredSystem: ...
    def __exit__(self, *_: object) -> None: ...
    def round(self) -> Round:
        """Run one round. Raises LaunchFailed when the system cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    elements: int
    tensors: int
    peers: int = 4
    target_group_size: int = 4
    codec: str = "float32"


class Workers:
    """A system made of worker processes that accept the orders `prepare`, `round` and `check`."""

    def __init__(
        self, name: str, *, python: Path, module: str, workload: Workload, links: Links | None = None
    ) -> None:
        """`links` are emulated links, open as long as the system is; None: loopback."""
        self._name, self._workload, self._links = name, workload, links
        configuration: dict[str, Any] = {
            "elements": workload.elements,
            "tensors": workload.tensors,
            "peers": workload.peers,
            "target_group_size": workload.target_group_size,
            "codec": workload.codec,
            "vector_bytes": find(workload.codec).encoded_bytes(workload.elements),
        }
        hosts = (
            ["127.0.0.1"] * workload.peers
            if links is None
            else [links.host(place) for place in range(workload.peers)]
        )
        configurations = [{**configuration, "host": host} for host in hosts]
        module = f"benchmarks.workers.{module}"
        if links is None:
            self._launch = Launch(name, python=python, module=module, configurations=configurations)
        else:
            self._launch = Launch(
                name, python=python, module=module, configurations=configurations, within=links.command
            )

    @property
    def name(self) -> str:
        return self._name

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self._links is not None:
                stack.enter_context(self._links)
            stack.enter_context(self._launch)
            self._launch.receive("ready", READY_TIMEOUT_S)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def round(self) -> Round:
        launch = self._launch
        launch.send("prepare")
        launch.receive("prepared", READY_TIMEOUT_S)
        before_s, before = launch.processor_s(), self._links.traffic() if self._links is not None else []
        at_s = time.monotonic() + START_AHEAD_S
        launch.send("round", at_s=at_s, timeout_s=ROUND_TIMEOUT_S)
        done = launch.receive("done", ROUND_TIMEOUT_S + 10.0)
        processor_s, after = (
            launch.processor_s() - before_s,
            self._links.traffic() if self._links is not None else [],
        )
        launch.send("check")
        checked = launch.receive("checked", READY_TIMEOUT_S)
        outcome = judge(done, checked, at_s=at_s, peers=self._workload.peers, processor_s=processor_s)
        return replace(
            outcome,
            wire_bytes=sum(new.sent_bytes - old.sent_bytes for new, old in zip(after, before, strict=True)),
            carried_bytes=sum(
                new.sent_payload_bytes - old.sent_payload_bytes
                for new, old in zip(after, before, strict=True)
            ),
        )


def judge(
    done: list[dict[str, Any]], checked: list[dict[str, Any]], *, at_s: float, peers: int, processor_s: float
) -> Round:
    """Return the result of one round from the reports of its workers."""
    delivered = min(report["delivered"] for report in checked)
    refused = [report["reason"] for report in done if not report["ok"]]
    sizes = sorted({report["group"] for report in done})
    digests = {report["digest"] for report in done if "digest" in report}
    reason = ""
    if refused:
        reason = refused[0]
    elif sizes != [peers]:
        reason = f"groups of {sizes} peers, not {peers}"
    elif delivered < DELIVERED_MIN:
        reason = f"{delivered:.1%} of the elements hold the average"
    elif len(digests) > 1:
        reason = "the peers hold different results"
    whole_s = max(report["end_s"] for report in done) - at_s
    grouped = [report["grouped_s"] for report in done if report["grouped_s"] is not None]
    group_s = max(grouped) - at_s if grouped else None
    reduce_s = max(report["end_s"] - (report["grouped_s"] or at_s) for report in done)
    phases: dict[str, float] = {}
    for report in done:
        for phase, seconds in report.get("phases", {}).items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
    return Round(
        ok=not reason,
        reason=reason,
        wrong=bool(reason) and not refused,
        whole_s=whole_s,
        group_s=group_s,
        reduce_s=reduce_s,
        processor_s=processor_s,
        delivered=delivered,
        phases=phases,
    )


class Bare:
    """The bare transport: moves the bytes of a float32 butterfly and reduces nothing, so there is no result
    to check.
    """

    name = "bare grpc.aio with TLS"

    def __init__(self, workload: Workload) -> None:
        self._butterfly = BareButterfly(vector_bytes=workload.elements * 4, processes=workload.peers)

    def __enter__(self) -> Bare:
        try:
            self._butterfly.__enter__()
        except RuntimeError as error:
            raise LaunchFailed(str(error)) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._butterfly.__exit__(*error)

    def round(self) -> Round:
        try:
            whole_s, processor_s = self._butterfly.round_detail()
        except RuntimeError as error:
            raise LaunchFailed(str(error)) from error
        return Round(ok=True, whole_s=whole_s, reduce_s=whole_s, processor_s=processor_s, delivered=1.0)
