"""One batch forward through a mixture of experts on other peers' machines. On the network loop.

Every expert is called once for all samples that chose it. Those that fail are replaced, for the samples that
lack answers then, by the next best ones; those that dawdle are dropped once every sample has enough
(`gathering`).

Shapes: B samples, S places for experts per sample (the first K as chosen, further ones replace what failed),
D dimensions of the grid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import torch

from moe.client.logic.beam import BeamSearch, Selection, compact
from moe.client.logic.dispatch import Places, not_among, places_of, spread
from moe.client.logic.gathering import Gathering
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.declarations import GridBranch as Declared
from moe.protocol.names import ExpertUid
from swarm.core.errors import NetworkError, NotEnoughPeers, SwarmError, UsageError
from swarm.core.ids import PeerId

T = TypeVar("T")

_INLINE_BYTES_MAX = 256 << 10  # larger tensors are cut up and put together in a thread of the pool
REASONS_SHOWN = 4


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExpertCall:
    """One expert's part of a forward pass."""

    made: ForwardResult
    places: Places


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MixtureOutput:
    """A forward pass. `coordinates_BSD` count from 0 in each dimension, and mean something where `chosen_BS`."""

    coordinates_BSD: torch.Tensor
    chosen_BS: torch.Tensor  # was to be asked at first
    answered_BS: torch.Tensor
    outputs: list[torch.Tensor]  # [B, S, …] each; empty when nobody has ever answered
    branches: list[ExpertCall]
    report: PassReport


class ForwardPass:
    """Use once. `scores`: as the gate gives them, on the CPU, finite; `inputs`: what experts get, first
    dimension B.
    """

    def __init__(
        self,
        calls: ReplicaCalls,
        pool: Executor | None,
        terms: MixtureOptions,
        scores: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        keep: bool,
    ) -> None:
        self._calls, self._pool, self._terms, self._keep = calls, pool, terms, keep
        self._scores, self._inputs = scores, inputs
        self._begun_s = calls.clock.monotonic_s()
        self._deadline_s = self._begun_s + terms.forward_timeout_s
        batch = inputs[0].shape[0]
        self._gathering = Gathering(batch, terms.k_min, terms.patience, self._begun_s, self._deadline_s)
        self._coordinates = torch.zeros(batch, 0, len(terms.grid.dimensions), dtype=torch.int64, device="cpu")
        self._there_BS = torch.zeros(batch, 0, dtype=torch.bool, device="cpu")
        self._places: list[Places] = []  # of every call
        self._uids: list[ExpertUid] = []
        self._made: dict[int, ForwardResult] = {}
        self._failed: dict[int, SwarmError] = {}
        self._tasks: dict[asyncio.Task[ForwardResult | SwarmError], int] = {}
        self._hopeless: set[ExpertUid] = set()  # failed in this pass
        self._replicas: dict[ExpertUid, Sequence[ExpertReplica]] = {}
        self._anew = self._asked_anew = self._desperate = self._last_resort = False
        self._lost = True  # some sample may have too few experts
        self._silent: set[PeerId] = set()  # peers that were not heard of in this pass when others were
        # how often others were looked for
        self._replaced_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._unread = ""  # why the DHT could not say which experts there are

    async def run(self, empty: Sequence[torch.Tensor]) -> MixtureOutput:
        """`empty`: what the outputs are like when nobody answers. NotEnoughPeers when that, or too few
        answers, is not allowed.
        """
        gathering, clock = self._gathering, self._calls.clock
        chosen = await self._search(self._scores, self._terms.k_best)
        async with asyncio.TaskGroup() as tasks:
            self._ask(tasks, chosen, torch.arange(len(self._there_BS), device="cpu"))
            at_first = self._there_BS
            while True:
                self._doubt_stalled()
                await self._replace_lost(tasks)
                if gathering.over(now_s := clock.monotonic_s()):
                    break
                timeout_s = max(min(gathering.deadline_s(), self._doubt_at_s()) - now_s, 0.0)
                done, _ = await asyncio.wait(
                    self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    self._note(self._tasks.pop(task), task.result())
            for task, number in self._tasks.items():
                task.cancel()
                self._failed[number] = NotEnoughPeers("it was too late")
        return await self._result(at_first, empty)

    async def _search(self, scores: Sequence[torch.Tensor], k: int) -> Selection:
        """The best experts that there are; when the DHT cannot say which those are, as far as that is known."""
        grid = self._terms.grid
        search = BeamSearch(scores, grid.dimensions, k, self._terms.beam)
        while wanted := search.wanted():
            uids = [ExpertUid(grid.block, prefix) for prefix in wanted]
            timeout_s = max(self._deadline_s - self._calls.clock.monotonic_s(), 0.0)
            try:
                found = await self._calls.atlas.look(uids, timeout_s=timeout_s, anew=self._anew)
            except NetworkError as error:
                self._unread = str(error)
                break
            search.opened(
                {prefix: self._usable(prefix, found[uid]) for prefix, uid in zip(wanted, uids, strict=True)}
            )
        return search.result()

    def _usable(self, prefix: tuple[int, ...], below: Declared) -> list[int]:
        """The coordinates directly below a prefix that lead on, or at its last dimension those of experts
        that can be asked.
        """
        if len(prefix) + 1 < len(self._terms.grid.dimensions):
            return sorted(below.deeper)
        usable = []
        for place, replicas in below.experts.items():
            expert = ExpertUid(self._terms.grid.block, (*prefix, place))
            silent = not self._last_resort and all(one.peer_id in self._silent for one in replicas)
            if (
                expert not in self._hopeless
                and not silent
                and self._calls.available(expert, replicas, self._begun_s if self._desperate else None)
            ):
                self._replicas[expert] = replicas
                usable.append(place)
        return usable

    def _ask(self, tasks: asyncio.TaskGroup, chosen: Selection, rows: torch.Tensor) -> None:
        """Call the chosen experts; `chosen.which_BK` is for these rows of the batch."""
        batch, before = self._there_BS.shape
        found_BKD = self._from_zero(chosen.experts)[chosen.which_BK]
        coordinates = torch.zeros(batch, *found_BKD.shape[1:], dtype=torch.int64, device="cpu")
        there = torch.zeros(batch, found_BKD.shape[1], dtype=torch.bool, device="cpu")
        coordinates[rows], there[rows] = found_BKD, chosen.which_BK >= 0
        self._coordinates = torch.cat([self._coordinates, coordinates], dim=1)
        self._there_BS = torch.cat([self._there_BS, there], dim=1)
        for prefix, places in zip(
            chosen.experts, places_of(chosen.which_BK, len(chosen.experts)), strict=True
        ):
            uid, number = ExpertUid(self._terms.grid.block, prefix), len(self._uids)
            where = Places(rows[places.rows], places.columns + before)
            self._uids.append(uid)
            self._places.append(where)
            usual_s = max(
                (self._calls.fleet.hedge_after_s(str(uid), one.peer_id) for one in self._replicas[uid]),
                default=0.0,
            )
            self._gathering.expect(number, where.rows, self._calls.clock.monotonic_s(), usual_s)
            self._tasks[tasks.create_task(self._call(uid, where.rows, self._desperate))] = number

    async def _call(self, uid: ExpertUid, rows: torch.Tensor, desperate: bool) -> ForwardResult | SwarmError:
        inputs = await rows_of(self._pool, self._inputs, rows)
        call = ForwardCall(uid, self._replicas[uid], inputs, self._keep, self._begun_s if desperate else None)
        try:
            return await self._calls.forward(call, deadline_s=self._deadline_s, travel=self._terms.travel)
        except SwarmError as error:
            return error

    def _note(self, number: int, outcome: ForwardResult | SwarmError) -> None:
        now_s = self._calls.clock.monotonic_s()
        if isinstance(outcome, ForwardResult):
            self._made[number] = outcome
            self._gathering.answered(number, now_s)
        else:
            self._failed[number] = outcome
            self._hopeless.add(self._uids[number])
            self._lost = True
            self._gathering.failed(number, now_s)

    def _doubt_at_s(self) -> float:
        may_doubt = self._terms.replacements_max > 0 and len(self._gathering.lacking_rows)
        stalled_s = self._gathering.stalled_s() if may_doubt else None
        return stalled_s if stalled_s is not None else float("inf")

    def _doubt_stalled(self) -> None:
        """Should nobody be heard of any more while samples lack answers, others are asked for these: a frozen
        peer may hold all of their experts.
        """
        if self._calls.clock.monotonic_s() < self._doubt_at_s():
            return
        doubted = [self._uids[number] for number in self._gathering.doubt()]
        self._hopeless.update(doubted)
        heard = {made.replica.peer_id for made in self._made.values()}
        self._silent.update(
            one.peer_id for uid in doubted for one in self._replicas[uid] if one.peer_id not in heard
        )
        self._lost = True

    async def _replace_lost(self, tasks: asyncio.TaskGroup) -> None:
        """For samples that lost too many experts ask others: from the second time on also those that are
        avoided, and the last time also those that have been silent in this pass.
        """
        times_max = self._terms.replacements_max if self._lost else 0
        self._lost = False
        for times in range(times_max):
            short = self._gathering.short_rows
            short = short[self._replaced_B[short] == times]
            if len(short) and self._calls.clock.monotonic_s() < self._deadline_s:
                self._replaced_B[short] += 1
                self._desperate, self._last_resort = times > 0, times + 1 == times_max
                await self._replace(tasks, short)
        self._desperate = self._last_resort = False

    async def _replace(self, tasks: asyncio.TaskGroup, short: torch.Tensor) -> None:
        """The best that these samples have not chosen yet. Should some find none, the DHT is asked anew who
        there is, once in a pass.
        """
        chosen = await self._others(short)
        if not self._asked_anew and bool((chosen.which_BK < 0).all(dim=1).any()):
            self._asked_anew = self._anew = True
            chosen = await self._others(short)
            self._anew = False
        self._ask(tasks, chosen, short)

    async def _others(self, short: torch.Tensor) -> Selection:
        grid, k = self._terms.grid, self._terms.k_min
        chosen = await self._search(
            [score[short] for score in self._scores], min(self._there_BS.shape[1] + k, grid.count)
        )
        found_BKD = self._from_zero(chosen.experts)[chosen.which_BK]
        which_BK = not_among(chosen.which_BK, found_BKD, self._coordinates[short], self._there_BS[short], k)
        return compact(chosen.experts, which_BK, chosen.certain)

    def _from_zero(self, experts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The experts' coordinates, counted from 0 in each dimension; one row more, of zeros, for the number
        -1.
        """
        firsts = tuple(dimension.start for dimension in self._terms.grid.dimensions)
        return torch.tensor([*experts, firsts], device="cpu") - torch.tensor(firsts, device="cpu")

    async def _result(self, at_first: torch.Tensor, empty: Sequence[torch.Tensor]) -> MixtureOutput:
        numbers = sorted(self._made)
        lacking = self._gathering.lacking_rows
        if len(lacking) and not self._terms.allow_zero_outputs:
            raise self._too_few(len(lacking))
        branches = [ExpertCall(self._made[number], self._places[number]) for number in numbers]
        answers = [branch.made.forwarded.outputs for branch in branches]
        batch, width = self._there_BS.shape
        like = answers[0] if answers else empty
        if any(
            [(one.shape[1:], one.dtype) for one in answer] != [(one.shape[1:], one.dtype) for one in like]
            for answer in answers
        ):
            raise UsageError(
                f"the experts of {self._terms.grid} have outputs of different shapes: a mixture needs one"
            )
        answered = torch.zeros_like(self._there_BS)
        for branch in branches:
            answered[branch.places.rows, branch.places.columns] = True
        size = sum(batch * width * one[:1].nbytes for one in like)
        places = [branch.places for branch in branches]
        outputs = await worked(self._pool, size, lambda: spread(batch, width, places, answers, like))
        # they are in `outputs` now, and need not be held twice until the backward pass
        branches = [ExpertCall(one.made.without_outputs(), one.places) for one in branches]
        chosen = torch.zeros_like(self._there_BS)
        chosen[:, : at_first.shape[1]] = at_first
        seconds = self._calls.clock.monotonic_s() - self._begun_s
        return MixtureOutput(
            self._coordinates, chosen, answered, outputs, branches, self._report(len(lacking), seconds)
        )

    def _report(self, short: int, seconds: float) -> PassReport:
        names = [str(uid) for uid in self._uids]
        return PassReport(
            asked=tuple(names),
            answered=tuple(names[number] for number in sorted(self._made)),
            failed={names[number]: str(error) for number, error in self._failed.items()},
            short_samples=short,
            seconds=seconds,
        )

    def _too_few(self, count: int) -> SwarmError:
        terms = self._terms
        reasons = [f"{self._uids[number]}: {error}" for number, error in sorted(self._failed.items())]
        told = "; ".join(reasons[:REASONS_SHOWN]) or self._unread or f"no expert of {terms.grid} is known"
        seconds = self._calls.clock.monotonic_s() - self._begun_s
        text = (
            f"{count} of {len(self._there_BS)} samples got fewer than k_min = {terms.k_min} answers in {seconds:.2g} s: {told}; "
            "let more servers hold these experts, lower k_min, or set allow_zero_outputs"
        )
        if self._failed and all(isinstance(error, UsageError) for error in self._failed.values()):
            return UsageError(text)
        return NotEnoughPeers(text)


async def rows_of(
    pool: Executor | None, tensors: Sequence[torch.Tensor], rows: torch.Tensor
) -> list[torch.Tensor]:
    """Copies of these samples."""
    size = sum(len(rows) * tensor[:1].nbytes for tensor in tensors)
    return await worked(pool, size, lambda: [tensor.index_select(0, rows) for tensor in tensors])


async def worked(pool: Executor | None, size_bytes: int, work: Callable[[], T]) -> T:
    """Tensor work: here when it is little, in a thread of the pool otherwise."""
    if size_bytes <= _INLINE_BYTES_MAX:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)
