"""The training state that peers share: parameters, optimizer statistics, counters, schedule, extra tensors,
epoch. No network here.

A received state is not trusted: names, dtypes and shapes must be exactly those of this peer's optimizer,
and numbers finite. Of step counters only numbers are taken, never structure. Hyperparameters are not taken at
all: they come from the caller's code, and the schedule follows the epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median_high
from typing import Any

import torch
from blake3 import blake3

from averaging.history.chain import Chain
from averaging.history.encoding import (
    ROOT_BYTES_MAX,
    decode_chain,
    decode_root,
    encode_chain,
    encode_root,
)
from averaging.optim.parameters import is_trained, parameters_of
from averaging.optim.state.device_reads import DeviceReader, DeviceReads, reader_of
from averaging.optim.state.encoding import EXACT, dtype_of
from averaging.optim.state.probe import is_statistic, probe, probe_shapes
from averaging.optim.state.schedule import EpochSchedule, Scheduler
from averaging.optim.state.snapshot import (
    ALIGNMENT_BYTES,
    DTYPE_NAMES,
    Blob,
    Snapshot,
    digests_of,
    flat_bytes,
    in_threads,
    is_finite,
    mapping,
    memory_of,
    merge,
    pack,
    plain,
    range_of,
    read_header,
    read_tensors,
    write_marks,
)
from averaging.optim.state.view import StateView, WriteLock
from averaging.reduction.sharded import refuse_sharded
from swarm.core.errors import PeerError, UsageError


class TrainingState:
    """The single owner of what training changes. Parameters change only while `lock` is held, so that a
    view shows one moment.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        extra_tensors: Sequence[torch.Tensor] = (),
        scheduler: Scheduler | None = None,
        make_reader: Callable[[torch.device], DeviceReader | None] = reader_of,
    ) -> None:
        """Take over the tensors of the optimizer. `make_reader` returns the reader of a device, None for
        the host; tests put a simulated device in its place.
        """
        self.inner, self.scheduler, self.extras = inner, scheduler, tuple(extra_tensors)
        self.parameters = parameters_of(inner)
        self._schedule = EpochSchedule(inner, scheduler) if scheduler is not None else None
        self._probed: list[dict[str, Any]] | None = None
        refuse_sharded(self.parameters, "parameter")
        refuse_sharded(self.extras, "extra tensor")
        self._reads = DeviceReads((tensor.device for tensor in (*self.parameters, *self.extras)), make_reader)
        self.reading = threading.RLock()  # held while live tensors are read
        self._views: list[StateView] = []  # open views
        # held while the state is changed: open views are copied before that
        self.lock = WriteLock(self.reading, self._views, self._reads)
        self.epoch = 0
        self.root: Chain | None = None  # the head of the state's history and its electors; None: it has none
        self.has_stepped = False  # the step to the next epoch is complete, although an error may follow it
        self.version = 0  # increases with every change of the state
        # the state is the output of an averaging round, equal on all peers and processors
        self.canonical = False
        for tensor in (*self.parameters, *self.extras):
            if tensor.dtype not in DTYPE_NAMES:
                raise UsageError(
                    f"tensors of {tensor.dtype} cannot be shared; known are {', '.join(DTYPE_NAMES.values())}"
                )
        # Buffers change with every forward pass, on the trainer's thread and differently on each peer. So
        # joining peers get the values that all peers agreed on last.
        self._agreed_extras = [tensor.detach().clone() for tensor in self.extras]
        # the digest of the frozen parameters, with the memory addresses and versions for which it was
        # computed
        self._frozen_digest: tuple[tuple[object, ...], bytes] = ((), b"")
        self.after_write()

    def mark_changed(self, epoch: int, *, canonical: bool = False, root: Chain | None = None) -> None:
        """Record that the state has changed and is in `epoch`, at the head of a history where `root` gives
        one. The lock is still held.
        """
        self.epoch, self.canonical, self.root = epoch, canonical, root
        self.version += 1
        self.has_stepped = False
        self._probed = None  # the probed statistics may be part of the state now
        self.after_write()

    def after_write(self) -> None:
        """Make this thread's queued device work part of the state, before any reader sees it. Releasing
        `lock` implies this.
        """
        self._reads.after_write()

    # --- averaging

    def averaged_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that peers average to become equal, in one order on all: trained parameters,
        their statistics, floating-point extra tensors.
        """
        trained = [p for p in self.parameters if is_trained(p)]
        statistics = [value for _, value in self._statistics() if value.is_floating_point()]
        return [
            *(p.detach() for p in trained),
            *statistics,
            *(t.detach() for t in self.extras if t.is_floating_point()),
        ]

    def agree_extras(self, counts: Sequence[Sequence[int]] = ()) -> None:
        """Adopt the extra tensors as the shared ones. Integers become the median of all peers, which no
        minority of them decides (`counts`: the `extra_counts` of each, this one included; without any, this
        peer's own hold).
        """
        with self.lock, torch.no_grad():
            whole = [t for t in self.extras if not t.is_floating_point()]
            ranges = [range_of(t.dtype) for t in whole for _ in range(t.numel())]
            fitting = [
                theirs
                for theirs in counts
                if len(theirs) == len(ranges)
                and all(low <= one <= high for one, (low, high) in zip(theirs, ranges, strict=True))
            ]
            agreed = [median_high(values) for values in zip(*fitting or [self.extra_counts()], strict=True)]
            for tensor in whole:
                taken, agreed = agreed[: tensor.numel()], agreed[tensor.numel() :]
                tensor.copy_(torch.tensor(taken, dtype=torch.int64, device="cpu").reshape(tensor.shape))
            for shared, tensor in zip(self._agreed_extras, self.extras, strict=True):
                shared.copy_(tensor)

    def extra_counts(self) -> list[int]:
        """Return all values of the integer extra tensors, such as BatchNorm's counters of batches."""
        whole = [t.detach().flatten().to(torch.int64) for t in self.extras if not t.is_floating_point()]
        devices = {t.device for t in whole}
        # one transfer per device
        values = {
            device: iter(torch.cat([t for t in whole if t.device == device]).tolist()) for device in devices
        }
        return [next(values[t.device]) for t in whole for _ in range(t.numel())]

    def counters_digest(self) -> bytes:
        """Return the digest of the state that peers must agree on but do not average: step counters and
        epoch. A peer that differs downloads the state.
        """
        scalars = self._scalars()
        return blake3(pack([scalars["state"], scalars["epoch"]])).digest()

    def hyperparameters_digest(self) -> bytes:
        """Return the digest of hyperparameters and schedule. They come from each peer's own code: a peer that
        differs is named.
        """
        scalars = self._scalars()
        return blake3(pack([scalars["groups"], scalars["schedule"]])).digest()

    def frozen_digest(self) -> bytes:
        """Return the digest of the parameters that are not trained, which peers must agree on but do not
        average; empty bytes when there are none. Computed again only when torch has seen them change.
        """
        frozen = [p for p in self.parameters if not is_trained(p)]
        if not frozen:
            return b""
        marks = write_marks(frozen)
        if marks != self._frozen_digest[0]:
            whole = blake3()
            for p in frozen:
                whole.update(memory_of(flat_bytes(p).cpu()) or b"")
            self._frozen_digest = marks, whole.digest()
        return self._frozen_digest[1]

    # --- reading

    def view(self, *, with_history: bool = True, past: Chain | None = None) -> StateView:
        """Return a view of the present state, to be read while training continues. It is copied only when
        the state is about to change. Close it afterwards. `with_history`: its header names the head of the
        state's history. `past`: the certificates that lead to that head, for a checkpoint.
        """
        with self.reading, torch.no_grad():
            view = StateView(
                (self.epoch, self.version, self.canonical),
                self._scalars() | (self._history_header(past) if with_history else {}),
                self._named(),
                self.reading,
                self._reads,
            )
            self._views[:] = [*(other for other in self._views if not other.closed), view]
            return view

    @property
    def views_open(self) -> int:
        """Return the number of views that are not closed: a change of the state copies each of them first."""
        return sum(not view.closed for view in self._views)

    def _history_header(self, past: Chain | None) -> dict[str, Any]:
        if self.root is None:
            return {}
        leads_here = past is not None and past.end == self.root
        return {
            "history": encode_root(self.root),
            **({"past": encode_chain(past)} if past is not None and leads_here else {}),
        }

    def snapshot(self, *, with_history: bool = True) -> Snapshot:
        """Return a copy of the state, with digests. Callable from any thread. `with_history` as in `view`."""
        view = self.view(with_history=with_history)
        view.complete_copy()
        view.close()
        return Snapshot(view.epoch, view.version, view.canonical, view.blob, digests_of(view.blob))

    @property
    def bytes_about(self) -> int:
        """Return the size of a snapshot without its header."""
        return sum(tensor.nbytes for _, tensor in self._named())

    def bytes_max(self) -> int:
        """Return the maximum size of an honest snapshot of this optimizer. It may be smaller: parameters
        that never had a gradient have no statistics.
        """
        tensors = [
            *self.parameters,
            *self.extras,
            *(t for structure in self.structure() for t in structure.values() if isinstance(t, torch.Tensor)),
        ]
        return (
            sum(t.nbytes + ALIGNMENT_BYTES for t in tensors)
            + 4 * len(pack(self._scalars()))
            + ROOT_BYTES_MAX
            + 4096 * (len(tensors) + 16)
        )

    # --- loading

    def load(self, blob: Blob, codec: str = EXACT) -> None:
        """Load a snapshot, which may be encoded by `codec`. Raise PeerError, with nothing changed, when it
        does not fit this optimizer, and UsageError when the caller's scheduler cannot follow to its epoch.
        """
        structure = self.structure()
        header, payload_start = read_header(blob)
        tensors = read_tensors(blob, header, payload_start)
        if header.get("codec", EXACT) not in (EXACT, codec):
            raise PeerError(f"the state is encoded by {header['codec']!r:.60}, not by {codec}")
        self._check(tensors, structure, header.get("codec", EXACT))
        root = root_of_header(header)
        counters = mapping(header.get("state"))
        groups = header.get("groups")
        if not isinstance(groups, list) or len(groups) != len(self.inner.param_groups):
            raise PeerError("the state has another number of parameter groups than this optimizer")
        if self._schedule is not None:
            self._schedule.check(header["epoch"])
        if any(
            _lacks_values(index, one, tensors, mapping(counters.get(str(index))))
            for index, one in enumerate(structure)
        ):
            structure = self._completed(probe(self.inner, self.parameters))
        with self.lock, torch.no_grad():
            # before anything is changed, because there may be no memory for them
            targets = self._targets(structure, tensors)
            if self._schedule is not None:  # nor may the caller's scheduler know so late an epoch
                self._schedule.move_to(header["epoch"], self.epoch)
            self._copy_parameters(tensors)
            for index, p in enumerate(self.parameters):
                self._load_statistics(
                    index, p, structure[index], tensors, mapping(counters.get(str(index))), targets[index]
                )
            for index, (extra, agreed) in enumerate(zip(self.extras, self._agreed_extras, strict=True)):
                extra.copy_(tensors[f"x.{index}"])
                agreed.copy_(extra)
            self.mark_changed(header["epoch"], root=root)

    def _copy_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters of a snapshot into ours."""

        def copy(index: int) -> None:
            with torch.no_grad():  # holds for one thread
                self.parameters[index].copy_(tensors[f"p.{index}"])

        in_threads(copy, [index for index, p in enumerate(self.parameters) if p.device.type == "cpu"])
        for index, p in enumerate(self.parameters):
            if p.device.type != "cpu":
                copy(index)  # on this thread's stream

    def _targets(
        self, structure: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """Return, per parameter, the tensor that receives each statistic of a snapshot: the present one,
        else that of the probe.
        """
        targets = []
        for index, (p, statistics) in enumerate(zip(self.parameters, structure, strict=True)):
            own = self.inner.state.get(p, {})
            held = [key for key in statistics if f"s.{index}.{key}" in tensors]
            targets.append(
                {key: own[key] if key in own else materialized(statistics[key], p) for key in held}
            )
        return targets

    def _load_statistics(
        self,
        index: int,
        p: torch.Tensor,
        structure: dict[str, Any],
        tensors: Mapping[str, torch.Tensor],
        counters: Mapping[str, Any],
        targets: Mapping[str, torch.Tensor],
    ) -> None:
        """Load the statistics of one parameter: tensors into `targets`, counters merged with ours."""
        if not any(f"s.{index}.{key}" in tensors or key in counters for key in structure):
            self.inner.state.pop(p, None)
            return
        own = self.inner.state[p]
        for key, value in structure.items():
            if key in targets:
                own[key] = targets[key].copy_(tensors[f"s.{index}.{key}"])
            else:
                own[key] = merge(value, counters.get(key), 0)

    def _check(
        self, tensors: Mapping[str, torch.Tensor], structure: Sequence[dict[str, Any]], codec: str
    ) -> None:
        known: dict[str, torch.Tensor] = {f"p.{index}": p for index, p in enumerate(self.parameters)}
        known |= {f"x.{index}": t for index, t in enumerate(self.extras)}
        missing = known.keys() - tensors.keys()
        if missing:
            raise PeerError(
                f"the state lacks {len(missing)} tensors of ours, {min(missing)} among them: "
                "another model or optimizer"
            )
        known |= {
            f"s.{i}.{key}": t
            for i, s in enumerate(structure)
            for key, t in s.items()
            if is_statistic(self.parameters[i], key, t)
        }
        for name, tensor in tensors.items():
            own = known.get(name)
            if own is None:
                raise PeerError(
                    f"the state has a tensor {name[:40]!r} that this optimizer has not: "
                    "another model or optimizer"
                )
            fits = tensor.dtype in (own.dtype, dtype_of(name, own.dtype, codec))
            if not fits or own.shape != tensor.shape:
                raise PeerError(
                    f"the state's {name[:40]!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"ours is {own.dtype} {tuple(own.shape)}"
                )
        for name, finite in zip(tensors, in_threads(is_finite, list(tensors.values())), strict=True):
            if not finite:
                raise PeerError(f"the state's {name[:40]!r} is not finite")
        for index, (p, wanted) in enumerate(zip(self.parameters, structure, strict=True)):
            held = [f"s.{index}.{key}" in tensors for key, t in wanted.items() if is_statistic(p, key, t)]
            if any(held) and not all(held):
                raise PeerError(f"the state has only some statistics of parameter {index}")

    # --- contents

    def _statistics(self) -> list[tuple[str, torch.Tensor]]:
        named = []
        for index, p in enumerate(self.parameters):
            for key, value in sorted(self.inner.state.get(p, {}).items()):
                if isinstance(value, (list, dict)):
                    raise UsageError(
                        f"{type(self.inner).__name__} keeps {key!r} as a {type(value).__name__}; "
                        "only tensors and numbers can be shared"
                    )
                if is_statistic(p, key, value):
                    named.append((f"s.{index}.{key}", value))
        return named

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        parameters = [(f"p.{index}", p) for index, p in enumerate(self.parameters)]
        return (
            parameters
            + self._statistics()
            + [(f"x.{index}", t) for index, t in enumerate(self._agreed_extras)]
        )

    def _scalars(self) -> dict[str, Any]:
        """Return the header of a snapshot. All numbers on one device come in one transfer.

        A view holds the state's lock for that time. This delays no writer: what is written next was
        computed from the state that the last write left, so that this write is complete on the device
        before the next one is due.
        """
        schedule = None if self.scheduler is None else self.scheduler.state_dict()
        if not self._reads:
            return self._header(schedule, torch.Tensor.item)
        tensors: list[torch.Tensor] = []
        self._header(schedule, tensors.append)
        numbers = dict(zip(map(id, tensors), self._reads.numbers(tensors), strict=True))
        return self._header(schedule, lambda tensor: numbers[id(tensor)])

    def _header(
        self, schedule: dict[str, Any] | None, number: Callable[[torch.Tensor], Any]
    ) -> dict[str, Any]:
        """Return the header of a snapshot. `number` returns the value of a tensor with one element."""
        counters = {}
        for index, p in enumerate(self.parameters):
            held = {
                key: plain(value, 0, number)
                for key, value in self.inner.state.get(p, {}).items()
                if not is_statistic(p, key, value)
            }
            if held:
                counters[str(index)] = held
        groups = [
            {key: plain(value, 0, number) for key, value in group.items() if key != "params"}
            for group in self.inner.param_groups
        ]
        return {
            "epoch": self.epoch,
            "state": counters,
            "groups": groups,
            "schedule": plain(schedule, 0, number),
        }

    def structure(self) -> list[dict[str, Any]]:
        """Return, per parameter, the statistics that this optimizer keeps: key -> tensor or number. Those
        that a first step would create have no memory where `probe_shapes` can find them.
        """
        if all(self.inner.state.get(p) or not p.requires_grad for p in self.parameters):
            return self._completed([{}] * len(self.parameters))
        if self._probed is None:  # used for the size before a download, and for its tensors after it
            self._probed = probe_shapes(self.inner, self.parameters) or probe(self.inner, self.parameters)
        return self._completed(self._probed)

    def _completed(self, probed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return, per parameter, the present statistics; those of a probe where there are none yet."""
        return [
            dict(self.inner.state.get(p, {})) or made for p, made in zip(self.parameters, probed, strict=True)
        ]


def root_of_header(header: Mapping[str, Any]) -> Chain | None:
    """Return the head of the history that a snapshot's header names; None where it names none. Raise
    PeerError when it is malformed.
    """
    return decode_root(header["history"]) if "history" in header else None


def past_of_header(header: Mapping[str, Any]) -> Chain | None:
    """Return the history that a snapshot's header names: the certificates that lead to its head, where it has
    them, which are not checked yet. Raise PeerError when it is malformed.
    """
    root = root_of_header(header)
    if root is None or "past" not in header:
        return root
    if not isinstance(header["past"], bytes):
        raise PeerError("the history of a state is bytes")
    past = decode_chain(header["past"])
    if past.end != root:
        raise PeerError("the certificates of the state lead to another head than its own")
    return past


def _lacks_values(
    index: int, structure: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], counters: Mapping[str, Any]
) -> bool:
    """Return whether a state has counters of a parameter but not its statistics: these then begin with the
    values that a first step gives them.
    """
    lacking = [
        k
        for k, t in structure.items()
        if isinstance(t, torch.Tensor) and t.is_meta and f"s.{index}.{k}" not in tensors
    ]
    return bool(lacking) and any(key in counters for key in structure)


def materialized(value: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a statistic to be written: that of the probe, or a new one on its parameter's device where the
    probe's has no memory.
    """
    return torch.empty_like(value, device=p.device) if value.is_meta else value
