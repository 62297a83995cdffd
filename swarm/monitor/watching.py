"""A monitor of one run: a node that accepts no calls, the selection of the run, and the services that watch
it. It may be used from any thread but the network's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId, open_run_id
from swarm.core.working import working
from swarm.membership.invite import Entrance
from swarm.monitor.collector import Collector
from swarm.monitor.history import ChartHistory
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.reading import progress_key
from swarm.monitor.logic.view import ExpertView, MonitorView, RunView
from swarm.monitor.relays import RelayWatch
from swarm.node import Node
from swarm.run.contributors import fetch_chains, totals_of
from swarm.run.directory import RunDirectory
from swarm.run.entering import FIND_S_MAX, enter, found_run
from swarm.run.membership import check_invited
from swarm.run.signed import SignedSpecification
from swarm.run.task import make_task
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from averaging.history.chain import Chain
    from moe.protocol.declarations import Directory
    from swarm.monitor.saving import StateSavingConfig

_log = logging.getLogger(__name__)

_CALL_S = 10.0

OnView = Callable[[MonitorView], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Settings of a monitor."""

    entry: tuple[str | Contact, ...]  # addresses, or an invite
    run: str | None = None  # NAME, NAME@ID or ID; None: the only run
    history: Callable[[str], Path | None] = lambda run_id: None  # path by run id; None: in memory
    saving: StateSavingConfig | None = None  # checkpoints of the run; None: do not save any
    grids: tuple[str, ...] = ()  # names of the expert grids to show; empty: all that servers announce


class Watch:
    """Monitor of one run, as a context manager. Raise NetworkError when no peer answers at the addresses, and
    UsageError when no run or more than one matches.
    """

    def __init__(self, config: WatchConfig, own: Identity | None = None) -> None:
        """`own`: identity of the monitor; None: a new one."""
        self.config = config
        self._signed: SignedSpecification | None = None
        self._grids: Directory | None = None
        self.deciding = frozenset[PeerId]()  # the electors of the head, as far as the entry peers know
        self.notice = ""  # a warning for the user about this monitor, if any
        self.node = Node(bootstrap=config.entry, listen=None, identity=own)
        self._listeners: list[OnView] = []
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            enter(self.node, [one if isinstance(one, str) else _text(one) for one in config.entry])
            self._directory = RunDirectory(self.node.dht.service, clock=self.node.clock)
            with working("asking for the runs of this swarm"):
                run = self.node.network.run(self._find(config.run), FIND_S_MAX + _CALL_S)
            self.history = self._open_history(run.run_id)
            events = EventLog()
            events.restore(self.history.events())
            self.model = Model(run, events=events, standing=self.node.standing)
            service = self.node.dht.service
            self.collector = Collector(
                dht=service,
                clock=self.node.clock,
                model=self.model,
                entry=Entrance.of(config.entry).contacts,
                known=lambda: list(service.overlay.table),
                remembered=lambda: [peer.contact for peer in self.node.book.known()],
                specification=self._specification if run.version else None,
                experts=self._experts,
                members=self._members,
                relays=RelayWatch(self.node.introductions, self.node.clock),
                after=self._after,
            )
            self.node.network.run(self._start(), TURN_S_MAX)
            undo.pop_all()

    @property
    def run(self) -> RunView:
        return self.model.run

    def listen(self, on_view: OnView) -> None:
        """Call `on_view` with every new view, on the network thread: it must not block."""
        with self._lock:
            self._listeners.append(on_view)

    def view(self) -> MonitorView:
        """Return the view of the run at this moment."""

        async def view() -> MonitorView:
            return self.view_now()

        return self.node.network.run(view(), TURN_S_MAX)

    def view_now(self) -> MonitorView:
        """Return the view of the run at this moment. Must be called on the network thread."""
        return self.model.view(self.node.clock.swarm_s())

    def follow(self, signed: SignedSpecification) -> None:
        """Show a newer version of the specification at once."""

        async def follow() -> None:
            self._signed = signed
            self.model.on_run(run_view(signed), self.node.clock.swarm_s())

        self.node.network.run(follow(), TURN_S_MAX)

    def close(self) -> None:
        """Close the node and the history. May be called more than once."""
        self.node.close()
        if hasattr(self, "history"):
            self.history.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # the network thread

    async def electors(self) -> list[Contact]:
        """Return the electors that offer their state, the most senior first, from the head of the first entry
        peer with a history. Must be called on the network thread.
        """
        donors = {contact.peer_id: contact for contact in self.collector.donors}
        for chain in (await self._histories(self.collector.entry)).values():
            if not isinstance(chain, SwarmError):
                return [donors[peer] for peer in chain.last_electors if peer in donors]
        return []

    async def _start(self) -> None:
        self.node.supervisor.spawn(f"watching {self.run.full_name}", self.collector.run, restart=True)
        if self.config.saving is not None:
            if self._signed is None:
                raise UsageError(
                    "--save needs a run with a specification: without one, only its trainers know the model"
                )
            from swarm.monitor.saving import StateSaver

            saver = StateSaver(
                signed=self._signed,
                caller=self.node.channels,
                clock=self.node.clock,
                model=self.model,
                donors=lambda: self.collector.donors,
                electors=self.electors,
                config=self.config.saving,
            )
            self.node.supervisor.spawn(f"saving {self.run.full_name}", saver.run, restart=True)

    async def _after(self) -> None:
        """Store the view after a poll, and pass it to the listeners."""
        view = self.view_now()
        events = self.model.events.take()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.history.add, view, events)
        except sqlite3.Error as error:  # a full disk must not stop the monitor
            if not self.notice:
                self.notice = f"the history is not kept any more: {error}"
        with self._lock:
            listeners: Sequence[OnView] = tuple(self._listeners)
        for on_view in listeners:
            on_view(view)

    def _open_history(self, run_id: str) -> ChartHistory:
        path = self.config.history(run_id)
        try:
            history = ChartHistory(path, run_id)
        except UsageError as error:
            self.notice = f"{error}. This monitor keeps its history in memory"
            return ChartHistory(None, run_id)
        if history.damaged is not None:
            self.notice = (
                f"the history {path} was damaged: it is kept as {history.damaged}, and a new one begins"
            )
        return history

    async def _find(self, wanted: str | None) -> RunView:
        """Return the wanted run: one with an owner's specification, or an open run of that name."""
        try:
            self._signed = await found_run(self._directory, wanted, membership=self.node.membership)
            check_invited(self._signed, self.node.membership)
            return run_view(self._signed)
        except UsageError as error:
            if wanted is None:
                raise UsageError(
                    f"{error}. Runs of programs that use the library are not announced: name one with --run"
                ) from None
            with contextlib.suppress(UsageError):
                run_id = open_run_id(wanted.rpartition("@")[2])
                found = await self.node.dht.service.get(progress_key(run_id), latest=True, timeout_s=_CALL_S)
                if isinstance(found, dict) and found:
                    return RunView(run_id=run_id, name=wanted if wanted != run_id else "")
            raise

    async def _experts(self) -> tuple[ExpertView, ...]:
        from moe.protocol.declarations import Directory
        from swarm.monitor.experts import experts_of

        if self._grids is None:
            self._grids = Directory(self.node.dht.service)
        return await experts_of(self._grids, self.config.grids)

    async def _histories(self, contacts: Iterable[Contact]) -> dict[Contact, Chain | SwarmError]:
        """Return the histories of some peers. Entry peers that do not take part in the run have none."""
        found = await fetch_chains(self.node.channels, self.run.run_id, contacts)
        for contact, chain in found.items():
            if isinstance(chain, SwarmError):
                _log.debug("no history of run %s from %s: %s", self.run.run_id, contact.peer_id.short, chain)
        return found

    async def _members(self) -> None:
        """Update the members and the totals of the run, from histories that are fetched once for both. Only
        the entry peers are trusted to name members.
        """
        if self._signed is not None:
            self.node.standing.add_members(self.run.run_id, [self._signed.owner])
        entry = {contact.peer_id for contact in self.collector.entry}
        contacts = {one.peer_id: one for one in (*self.collector.donors, *self.collector.entry)}
        ordered = sorted(contacts.values(), key=lambda one: one.peer_id not in entry)
        histories = await self._histories(ordered)
        for contact, chain in histories.items():
            if contact.peer_id not in entry or isinstance(chain, SwarmError):
                continue
            self.deciding = frozenset(chain.last_electors)
            self.node.standing.add_members(
                self.run.run_id,
                [*chain.electors]
                + [peer for one in chain.certificates for peer in (*one.electors, *one.workers)],
            )
        with contextlib.suppress(PeerError):  # nobody has a receipt yet
            self.model.leaders.take((await totals_of(self.node.channels, self.run.run_id, histories)).totals)

    async def _specification(self) -> RunView | None:
        self._signed = await self._directory.specification(self.run.run_id)
        return run_view(self._signed)


def _text(contact: Contact) -> str:
    return next(iter(contact.multiaddrs), str(contact.peer_id))


def run_view(signed: SignedSpecification) -> RunView:
    """Return the view of a specification. It includes the task's own description if the task is installed."""
    specification = signed.training
    parameters, summary = None, ""
    with contextlib.suppress(SwarmError):
        chosen = specification.task
        described = make_task(chosen.name, chosen.settings, chosen.package).describe(specification.batch_size)
        parameters, summary = described.parameters, described.summary
    return RunView(
        run_id=signed.run_id,
        name=signed.name,
        description=specification.description or summary,
        task=specification.task.name,
        mode=specification.mode.name,
        codec=specification.wire_format,
        optimizer=specification.optimizer.name,
        version=signed.version,
        target=specification.target_batch_size,
        parameters=parameters,
        created_s=signed.created_s,
        paused=specification.paused,
        pauses=tuple((one.starts_s, one.ends_s) for one in specification.pauses),
        ended=specification.ended,
        message=specification.message,
    )
