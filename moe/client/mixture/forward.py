"""The forward pass of one batch through a mixture of experts on other peers. Runs on the network loop.

Every expert is called once for all samples that selected it. Experts that fail are replaced, for the samples
that lack answers then, by the next best ones. Samples for which nobody is left are tried again after growing
pauses, until the deadline, since servers restart. Slow experts are dropped once every sample has enough
answers (`gathering`).

Shapes: B samples, S slots for experts per sample (the first K as selected, further ones for replacements), K
best experts, D dimensions of the grid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import torch

from moe.client.logic.beam import BeamSearch, Selection, compact
from moe.client.logic.dispatch import (
    Places,
    exclude_known,
    join_places,
    places_of,
    scatter_outputs,
    split_places,
)
from moe.client.logic.gathering import Gathering
from moe.client.mixture.options import REPLACEMENTS_MAX, MixtureOptions, PassReport
from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.declarations import GridBranch as GridBranch
from moe.protocol.errors import ExpertFailed
from moe.protocol.names import ExpertUid
from swarm.core.backoff import Backoff
from swarm.core.errors import NetworkError, NotEnoughPeers, SwarmError, UsageError
from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent

T = TypeVar("T")

_INLINE_BYTES_MAX = 256 << 10  # larger tensors are split and joined in a thread of the pool
REASONS_SHOWN = 4
# Pause before failed experts are asked again; doubles. Too small: restarting servers are asked constantly;
# too large: a step waits although the server is back.
_RETRY_PAUSE_FIRST_S = 0.1
_RETRY_PAUSE_S_MAX = 1.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExpertCall:
    """One expert's part of a forward pass."""

    result: ForwardResult
    places: Places


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MixtureOutput:
    """The result of a forward pass. `coordinates_BSD` count from 0 in each dimension, and are meaningful
    where `selected_BS` or `answered_BS` is true.
    """

    coordinates_BSD: torch.Tensor
    selected_BS: torch.Tensor  # the initial selection, without replacements
    answered_BS: torch.Tensor
    outputs: list[torch.Tensor]  # [B, S, …] each; zeros where no expert answered
    branches: list[ExpertCall]
    report: PassReport


class ForwardPass:
    """A forward pass; use once. `scores` are the gate's, on the CPU and finite; `inputs` are the experts'
    inputs, first dimension B.
    """

    def __init__(
        self,
        calls: ReplicaCalls,
        pool: Executor | None,
        options: MixtureOptions,
        scores: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        keep: bool,
    ) -> None:
        self._calls, self._pool, self._options, self._keep = calls, pool, options, keep
        self._scores, self._inputs = scores, inputs
        self._begun_s = calls.clock.monotonic_s()
        self._deadline_s = self._begun_s + options.forward_timeout_s
        batch = inputs[0].shape[0]
        self._gathering = Gathering(
            batch, options.k_min, options.gather_timeouts, self._begun_s, self._deadline_s
        )
        self._coordinates = torch.zeros(
            batch, 0, len(options.grid.dimensions), dtype=torch.int64, device="cpu"
        )
        self._occupied_BS = torch.zeros(batch, 0, dtype=torch.bool, device="cpu")
        self._places: list[Places] = []  # by call
        self._uids: list[ExpertUid] = []
        self._results: dict[int, ForwardResult] = {}
        self._failed: dict[int, SwarmError] = {}
        self._pending: set[int] = set()  # calls without an outcome
        self._tasks: list[asyncio.Task[None]] = []  # that make calls
        self._changed = ChangeEvent()  # there is another outcome
        self._excluded: set[ExpertUid] = set()  # failed or suspected in this pass
        self._replicas: dict[ExpertUid, Sequence[ExpertReplica]] = {}
        self._refresh_directory = self._has_refreshed = self._include_silent = False
        # avoided replicas are asked as well, except those that failed since this time; None: they are not
        self._avoided_since_s: float | None = None
        self._retry_pauses = Backoff(_RETRY_PAUSE_FIRST_S, _RETRY_PAUSE_S_MAX)
        self._retry_at_s: float | None = None  # when samples without any expert are tried again
        self._may_lack_experts = True  # True: samples may have lost experts since the last check
        self._silent: set[PeerId] = set()  # peers that did not answer in this pass when others did
        # how often replacements were searched for
        self._replaced_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._directory_error = ""  # why the DHT could not be read

    async def run(self, empty: Sequence[torch.Tensor]) -> MixtureOutput:
        """Run the pass. `empty` gives the shape and dtype of the outputs when no expert answers.

        Raises NotEnoughPeers when samples have too few answers and the options do not allow that, and
        UsageError when the experts' outputs differ in shape.
        """
        gathering, clock = self._gathering, self._calls.clock
        selection = await self._search(self._scores, self._options.k_best)
        async with asyncio.TaskGroup() as tasks:
            self._start_calls(tasks, selection, torch.arange(len(self._occupied_BS), device="cpu"))
            initially_occupied = self._occupied_BS.clone()
            while True:
                self._suspect_stalled()
                await self._replace_missing(tasks)
                await self._retry_missing(tasks)
                now_s, retry_at_s = clock.monotonic_s(), self._retry_at_s
                if now_s >= self._deadline_s or (retry_at_s is None and gathering.over(now_s)):
                    break
                until_s = gathering.deadline_s() if retry_at_s is None else min(retry_at_s, self._deadline_s)
                await self._changed.wait(max(min(until_s, self._suspect_at_s()) - now_s, 0.0))
            for task in self._tasks:
                task.cancel()
        # not before the calls have ended: results may have come meanwhile
        self._failed |= {number: NotEnoughPeers("it was too late") for number in self._pending}
        return await self._result(initially_occupied, empty)

    async def _search(self, scores: Sequence[torch.Tensor], k: int) -> Selection:
        """Return the best experts that exist. When the DHT cannot be read, the search covers what is
        known.
        """
        grid = self._options.grid
        search = BeamSearch(scores, grid.dimensions, k)
        while wanted := search.wanted():
            uids = [ExpertUid(grid.block, prefix) for prefix in wanted]
            timeout_s = max(self._deadline_s - self._calls.clock.monotonic_s(), 0.0)
            try:
                found = await self._calls.directory.branches(
                    uids, timeout_s=timeout_s, refresh=self._refresh_directory
                )
            except NetworkError as error:
                self._directory_error = str(error)
                break
            search.opened(
                {prefix: self._usable(prefix, found[uid]) for prefix, uid in zip(wanted, uids, strict=True)}
            )
        return search.result()

    def _usable(self, prefix: tuple[int, ...], below: GridBranch) -> list[int]:
        """Return the coordinates directly below a prefix: of further prefixes, or at the last dimension of
        the experts that can be asked.
        """
        if len(prefix) + 1 < len(self._options.grid.dimensions):
            return sorted(below.deeper)
        usable = []
        for place, replicas in below.experts.items():
            expert = ExpertUid(self._options.grid.block, (*prefix, place))
            silent = not self._include_silent and all(one.peer_id in self._silent for one in replicas)
            if (
                expert not in self._excluded
                and not silent
                and self._calls.available(expert, replicas, self._avoided_since_s)
            ):
                self._replicas[expert] = replicas
                usable.append(place)
        return usable

    def _start_calls(self, tasks: asyncio.TaskGroup, selection: Selection, rows: torch.Tensor) -> None:
        """Call the selected experts; `selection.indices_BK` belongs to these rows of the batch."""
        batch, width_before = self._occupied_BS.shape
        found_BKD = self._zero_based(selection.experts)[selection.indices_BK]
        coordinates = torch.zeros(batch, *found_BKD.shape[1:], dtype=torch.int64, device="cpu")
        occupied = torch.zeros(batch, found_BKD.shape[1], dtype=torch.bool, device="cpu")
        coordinates[rows], occupied[rows] = found_BKD, selection.indices_BK >= 0
        self._coordinates = torch.cat([self._coordinates, coordinates], dim=1)
        self._occupied_BS = torch.cat([self._occupied_BS, occupied], dim=1)
        found_places = places_of(selection.indices_BK, len(selection.experts))
        sizes, joined = [len(one.rows) for one in found_places], join_places(found_places)
        joined = Places(rows[joined.rows], joined.columns + width_before)
        selected = tasks.create_task(select_rows(self._pool, self._inputs, joined.rows, sizes))
        places_by_expert, first = split_places(joined, sizes), len(self._uids)
        for prefix, batch_places in zip(selection.experts, places_by_expert, strict=True):
            uid, number = ExpertUid(self._options.grid.block, prefix), len(self._uids)
            self._uids.append(uid)
            self._places.append(batch_places)
            expected_s = max(
                (self._calls.stats.hedge_after_s(str(uid), one.peer_id) for one in self._replicas[uid]),
                default=0.0,
            )
            self._gathering.expect(number, batch_places.rows, self._calls.clock.monotonic_s(), expected_s)
            self._pending.add(number)
        work = self._call(first, selected, self._avoided_since_s)
        self._tasks.append(tasks.create_task(work))

    async def _call(
        self,
        first: int,
        selected: asyncio.Task[list[list[torch.Tensor]]],
        include_avoided_since_s: float | None,
    ) -> None:
        """Make the calls from number `first` on. `selected` returns their inputs."""
        calls = []
        for number, inputs in enumerate(await selected, start=first):
            uid = self._uids[number]
            calls.append(ForwardCall(uid, self._replicas[uid], inputs, self._keep, include_avoided_since_s))

        def on_results(results: Mapping[int, ForwardResult | SwarmError]) -> None:
            for part, outcome in results.items():
                self._on_outcome(first + part, outcome)
            self._changed.notify()

        await self._calls.forward_all(
            calls, on_results, deadline_s=self._deadline_s, codecs=self._options.codecs
        )

    def _on_outcome(self, number: int, outcome: ForwardResult | SwarmError) -> None:
        now_s = self._calls.clock.monotonic_s()
        self._pending.remove(number)
        if isinstance(outcome, ForwardResult):
            self._results[number] = outcome
            self._gathering.answered(number, now_s)
        else:
            self._failed[number] = outcome
            self._excluded.add(self._uids[number])
            self._may_lack_experts = True
            self._gathering.failed(number, now_s)

    def _suspect_at_s(self) -> float:
        may_suspect = REPLACEMENTS_MAX > 0 and len(self._gathering.rows_below_k_min)
        suspect_at_s = self._gathering.suspect_at_s() if may_suspect else None
        return suspect_at_s if suspect_at_s is not None else float("inf")

    def _suspect_stalled(self) -> None:
        """Suspect pending experts when no answer has arrived for a while and samples lack answers, so that
        replacements are asked: a frozen peer may host all experts of a sample.
        """
        if self._calls.clock.monotonic_s() < self._suspect_at_s():
            return
        suspected = [self._uids[number] for number in self._gathering.suspect()]
        self._excluded.update(suspected)
        answering_peers = {result.replica.peer_id for result in self._results.values()}
        self._silent.update(
            one.peer_id
            for uid in suspected
            for one in self._replicas[uid]
            if one.peer_id not in answering_peers
        )
        self._may_lack_experts = True

    async def _replace_missing(self, tasks: asyncio.TaskGroup) -> None:
        """Ask replacements for samples that lost too many experts. From the second time on avoided experts
        are asked as well, and the last time also those that were silent in this pass.
        """
        times_max = REPLACEMENTS_MAX if self._may_lack_experts else 0
        self._may_lack_experts = False
        for times in range(times_max):
            rows = self._gathering.unsatisfiable_rows
            rows = rows[self._replaced_B[rows] == times]
            if len(rows) and self._calls.clock.monotonic_s() < self._deadline_s:
                self._replaced_B[rows] += 1
                self._avoided_since_s = self._begun_s if times > 0 else None
                self._include_silent = times + 1 == times_max
                await self._replace(tasks, rows)
        self._avoided_since_s, self._include_silent = None, False

    async def _retry_missing(self, tasks: asyncio.TaskGroup) -> None:
        """After a pause, ask again for samples that nobody is left to compute: for them experts that failed
        count as not asked yet, and the directory is read again. Every second time also peers that were silent
        in this pass are asked.
        """
        rows = (
            self._gathering.unsatisfiable_rows if self._may_retry else self._gathering.unsatisfiable_rows[:0]
        )
        now_s = self._calls.clock.monotonic_s()
        if not len(rows):
            self._retry_at_s = None
        elif self._retry_at_s is None:
            self._retry_at_s = now_s + self._retry_pauses.next_s()
        elif now_s >= self._retry_at_s:
            self._retry_at_s = now_s + self._retry_pauses.next_s()
            self._excluded.intersection_update(self._uids[number] for number in self._pending)
            for number in self._failed:
                places = self._places[number]
                self._occupied_BS[places.rows, places.columns] = False
            self._avoided_since_s, self._refresh_directory = now_s, True
            self._include_silent = self._retry_pauses.failures % 2 == 1
            self._start_calls(tasks, await self._search_alternatives(rows), rows)
            self._avoided_since_s, self._refresh_directory, self._include_silent = None, False, False

    @property
    def _may_retry(self) -> bool:
        """Return whether trying again may help: some failure was of a kind that passes, and an answer is
        required.
        """
        if self._options.allow_zero_outputs:
            return False
        return bool(self._directory_error or self._silent) or any(
            not isinstance(error, UsageError | ExpertFailed) for error in self._failed.values()
        )

    async def _replace(self, tasks: asyncio.TaskGroup, rows: torch.Tensor) -> None:
        """Call the best experts that these rows have not selected yet. When some rows find none, the
        directory is read again, once in a pass.
        """
        selection = await self._search_alternatives(rows)
        if not self._has_refreshed and bool((selection.indices_BK < 0).all(dim=1).any()):
            self._has_refreshed = self._refresh_directory = True
            selection = await self._search_alternatives(rows)
            self._refresh_directory = False
        self._start_calls(tasks, selection, rows)

    async def _search_alternatives(self, rows: torch.Tensor) -> Selection:
        grid, k = self._options.grid, self._options.k_min
        selection = await self._search(
            [score[rows] for score in self._scores], min(self._occupied_BS.shape[1] + k, grid.count)
        )
        found_BKD = self._zero_based(selection.experts)[selection.indices_BK]
        indices_BK = exclude_known(
            selection.indices_BK, found_BKD, self._coordinates[rows], self._occupied_BS[rows], k
        )
        return compact(selection.experts, indices_BK, selection.certain)

    def _zero_based(self, experts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return the experts' coordinates, counted from 0 in each dimension, followed by one row of zeros for
        the index -1.
        """
        firsts = tuple(dimension.start for dimension in self._options.grid.dimensions)
        return torch.tensor([*experts, firsts], device="cpu") - torch.tensor(firsts, device="cpu")

    async def _result(self, initially_occupied: torch.Tensor, empty: Sequence[torch.Tensor]) -> MixtureOutput:
        numbers = sorted(self._results)
        below_k_min = self._gathering.rows_below_k_min
        if len(below_k_min) and not self._options.allow_zero_outputs:
            raise self._too_few(len(below_k_min))
        answers = [self._results[number].forward_reply.take_outputs() for number in numbers]
        like = answers[0] if answers else empty
        if any(
            [(one.shape[1:], one.dtype) for one in answer] != [(one.shape[1:], one.dtype) for one in like]
            for answer in answers
        ):
            raise UsageError(
                f"the experts of {self._options.grid} have outputs of different shapes: a mixture needs one"
            )
        answered = torch.zeros_like(self._occupied_BS)
        joined = join_places([self._places[number] for number in numbers])
        answered[joined.rows, joined.columns] = True
        # only slots for replacements that have an answer, because each takes as much memory as the batch
        used_S = answered.any(dim=0)
        used_S[: initially_occupied.shape[1]] = True
        column_of = used_S.cumsum(0) - 1
        sizes = [len(self._places[number].rows) for number in numbers]
        places = split_places(Places(joined.rows, column_of[joined.columns]), sizes)
        batch, width = len(answered), int(used_S.sum())
        size = sum(batch * width * one[:1].nbytes for one in like)
        outputs = await offload(
            self._pool, size, lambda: scatter_outputs(batch, width, places, answers, like)
        )
        branches = [
            ExpertCall(self._results[number], one) for number, one in zip(numbers, places, strict=True)
        ]
        selected = torch.zeros(batch, width, dtype=torch.bool, device="cpu")
        selected[:, : initially_occupied.shape[1]] = initially_occupied
        seconds = self._calls.clock.monotonic_s() - self._begun_s
        report = self._report(len(below_k_min), seconds)
        return MixtureOutput(
            self._coordinates[:, used_S], selected, answered[:, used_S], outputs, branches, report
        )

    def _report(self, short_samples: int, seconds: float) -> PassReport:
        names = [str(uid) for uid in self._uids]
        return PassReport(
            asked=tuple(names),
            answered=tuple(names[number] for number in sorted(self._results)),
            failed={names[number]: str(error) for number, error in self._failed.items()},
            short_samples=short_samples,
            seconds=seconds,
        )

    def _too_few(self, count: int) -> SwarmError:
        options = self._options
        reasons = [f"{self._uids[number]}: {error}" for number, error in sorted(self._failed.items())]
        reasons_text = (
            "; ".join(reasons[:REASONS_SHOWN])
            or self._directory_error
            or f"no expert of {options.grid} is known"
        )
        seconds = self._calls.clock.monotonic_s() - self._begun_s
        text = (
            f"{count} of {len(self._occupied_BS)} samples got fewer than k_min = {options.k_min} answers "
            f"in {seconds:.2g} s: {reasons_text}; "
            "let more servers host these experts, lower k_min, or set allow_zero_outputs"
        )
        if self._failed and all(isinstance(error, UsageError) for error in self._failed.values()):
            return UsageError(text)
        return NotEnoughPeers(text)


async def select_rows(
    pool: Executor | None, tensors: Sequence[torch.Tensor], rows: torch.Tensor, sizes: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Return copies of samples: for each expert those of its rows, of every tensor. `sizes` says how many of
    the rows each expert has. All are copied at once, which takes much less time than a copy for each of
    hundreds of experts.
    """

    def select() -> list[list[torch.Tensor]]:
        columns = [torch.split(tensor.index_select(0, rows), list(sizes)) for tensor in tensors]
        return [list(one) for one in zip(*columns, strict=True)]

    return await offload(pool, sum(sizes) * sum(tensor[:1].nbytes for tensor in tensors), select)


async def offload(pool: Executor | None, size_bytes: int, work: Callable[[], T]) -> T:
    """Run tensor work: in place when it is little, in a thread of the pool otherwise."""
    if size_bytes <= _INLINE_BYTES_MAX:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)
