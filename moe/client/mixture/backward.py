"""The backward pass of a batch through a mixture: every expert that answered is called once, at the replica
that answered. Runs on the network loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch

from moe.client.logic.dispatch import join_places, sum_input_gradients
from moe.client.logic.gathering import Gathering
from moe.client.mixture.forward import REASONS_SHOWN, MixtureOutput, offload, select_rows
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.replicas.calling import ReplicaCalls
from moe.protocol.calls import BackwardReply, GradientPass
from moe.protocol.errors import ExpertNotInvited
from swarm.core.errors import DeadlineExceeded, NotEnoughPeers, SwarmError
from swarm.core.notify import ChangeEvent


class BackwardPass:
    """Computes the gradients of a forward pass's inputs; each expert that answered makes a step. Use once."""

    def __init__(
        self,
        calls: ReplicaCalls,
        pool: Executor | None,
        options: MixtureOptions,
        mixture_output: MixtureOutput,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._calls, self._pool, self._options, self._mixture_output, self._inputs = (
            calls,
            pool,
            options,
            mixture_output,
            inputs,
        )

    async def run(
        self, gradients: Sequence[torch.Tensor | None], pass_number: int
    ) -> tuple[list[torch.Tensor | None], PassReport]:
        """Return the gradients of the floating-point inputs, and a report. `gradients` holds [B, S, …] or
        None for every floating-point output. `pass_number` is that of this backward pass among those of one
        forward pass, from 0 on; a repeated one has the number that it had.

        Raises ExpertNotInvited when that is why no expert gave gradients, and NotEnoughPeers when a sample
        got fewer than `backward_k_min` gradients.
        """
        options, clock = self._options, self._calls.clock
        begun_s = clock.monotonic_s()
        deadline_s = begun_s + options.backward_timeout_s
        gathering = self._gathering(begun_s, deadline_s)
        branches = self._mixture_output.branches
        found: dict[int, Sequence[torch.Tensor | None]] = {}
        versions_apart: dict[str, int] = {}
        failed: dict[int, SwarmError] = {}
        changed = ChangeEvent()

        def on_replies(replies: Mapping[int, BackwardReply | SwarmError]) -> None:
            now_s = clock.monotonic_s()
            for number, outcome in replies.items():
                if isinstance(outcome, SwarmError):
                    failed[number] = outcome
                    gathering.failed(number, now_s)
                    continue
                found[number] = outcome.gradients
                forward = branches[number].result
                if outcome.version != forward.forward_reply.version:
                    versions_apart[str(forward.uid)] = outcome.version - forward.forward_reply.version
                gathering.answered(number, now_s)
            changed.notify()

        async def call() -> None:
            passes = [
                (branch.result.for_pass(pass_number), GradientPass(*tensors, options.staleness_max))
                for branch, tensors in zip(branches, await self._select(gradients), strict=True)
            ]
            await self._calls.backward_all(passes, on_replies, deadline_s=deadline_s, codecs=options.codecs)

        async with asyncio.TaskGroup() as tasks:
            for number, branch in enumerate(branches):
                gathering.expect(number, branch.places.rows, begun_s)
            calling = tasks.create_task(call())
            while not gathering.over(now_s := clock.monotonic_s()):
                await changed.wait(max(gathering.deadline_s() - now_s, 0.0))
            calling.cancel()
        # not before the calls have ended: replies may have come meanwhile
        for number in set(range(len(branches))) - found.keys() - failed.keys():
            failed[number] = DeadlineExceeded("it was too late")
            self._calls.backward_timed_out(branches[number].result)
        below_k_min = len(gathering.rows_below_k_min)
        names = [str(branch.result.uid) for branch in branches]
        if below_k_min or not found:
            self._raise_lack(below_k_min, {names[number]: error for number, error in failed.items()})
        parts = [(branches[number].places, found[number]) for number in sorted(found)]
        size = sum(tensor.nbytes for tensor in self._inputs)
        sums = await offload(self._pool, size, lambda: sum_input_gradients(self._inputs, parts))
        return sums, PassReport(
            asked=tuple(names),
            answered=tuple(names[number] for number in sorted(found)),
            failed={names[number]: str(error) for number, error in failed.items()},
            short_samples=below_k_min,
            seconds=clock.monotonic_s() - begun_s,
            versions_apart=versions_apart,
        )

    def _gathering(self, begun_s: float, deadline_s: float) -> Gathering:
        options = self._options
        # a backward pass takes longer than a forward pass: `after_k_min_s` is only a lower limit here
        gather_timeouts = replace(
            options.gather_timeouts,
            after_k_min_s=None,
            wait_s_min=max(options.gather_timeouts.wait_s_min, options.gather_timeouts.after_k_min_s or 0.0),
        )
        batch = self._inputs[0].shape[0]
        return Gathering(batch, options.backward_k_min, gather_timeouts, begun_s, deadline_s)

    def _raise_lack(self, below_k_min: int, failed: Mapping[str, SwarmError]) -> None:
        """Raise the error for samples without enough gradients, if there are some. Where this peer must not
        train, no pass of its layer will ever count, and a report would be overlooked: that is raised, too.
        """
        for error in failed.values():
            if isinstance(error, ExpertNotInvited):
                raise error
        if below_k_min:
            shown = "; ".join(f"{name}: {error}" for name, error in list(failed.items())[:REASONS_SHOWN])
            raise NotEnoughPeers(
                f"{below_k_min} samples got fewer than "
                f"backward_k_min = {self._options.backward_k_min} gradients: {shown}"
            )

    async def _select(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]]:
        """Return the inputs and the gradients of each expert's samples."""
        places = [branch.places for branch in self._mixture_output.branches]
        if not places:
            return []
        sizes, joined = [len(one.rows) for one in places], join_places(places)
        inputs = await select_rows(self._pool, self._inputs, joined.rows, sizes)

        def select() -> list[Sequence[torch.Tensor | None]]:
            columns: list[Sequence[torch.Tensor | None]] = [
                (None,) * len(sizes) if one is None else torch.split(one[joined.rows, joined.columns], sizes)
                for one in gradients
            ]
            return [[column[number] for column in columns] for number in range(len(sizes))]

        size = sum(one.nbytes for one in gradients if one is not None)
        return list(zip(inputs, await offload(self._pool, size, select), strict=True))
