"""The backward pass of a batch through a mixture: every expert that answered is called once, where it
answered. On the network loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch

from moe.client.logic.dispatch import add_up
from moe.client.logic.gathering import Gathering
from moe.client.mixture.forward import REASONS_SHOWN, ExpertCall, MixtureOutput, rows_of, worked
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.replicas.calling import ReplicaCalls, with_new_request_id
from moe.protocol.calls import GradientPass
from swarm.core.errors import NotEnoughPeers, SwarmError


class BackwardPass:
    """The gradients of a forward pass's inputs; each expert that answered makes a step. Use once."""

    def __init__(
        self,
        calls: ReplicaCalls,
        pool: Executor | None,
        terms: MixtureOptions,
        mixed: MixtureOutput,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._calls, self._pool, self._terms, self._mixed, self._inputs = calls, pool, terms, mixed, inputs

    async def run(
        self, gradients: Sequence[torch.Tensor | None], *, again: bool
    ) -> tuple[list[torch.Tensor | None], PassReport]:
        """`gradients`: [B, S, …] for every floating output, or None. `again`: another pass of the same
        forward, to be applied as well.

        NotEnoughPeers when a sample got fewer than `backward_k_min` gradients.
        """
        terms, clock = self._terms, self._calls.clock
        begun_s = clock.monotonic_s()
        deadline_s = begun_s + terms.backward_timeout_s
        # a backward pass takes longer than a forward pass: never less patience than the quicker ones took
        # themselves
        patience = replace(
            terms.patience,
            after_k_min_s=None,
            least_s=max(terms.patience.least_s, terms.patience.after_k_min_s or 0.0),
        )
        gathering = Gathering(self._inputs[0].shape[0], terms.backward_k_min, patience, begun_s, deadline_s)
        branches = self._mixed.branches
        found: dict[int, Sequence[torch.Tensor | None]] = {}
        failed: dict[int, str] = {}
        async with asyncio.TaskGroup() as tasks:
            running = {}
            for number, branch in enumerate(branches):
                gathering.expect(number, branch.places.rows, begun_s)
                running[tasks.create_task(self._call(branch, gradients, deadline_s, again))] = number
            while not gathering.over(now_s := clock.monotonic_s()):
                timeout_s = max(gathering.deadline_s() - now_s, 0.0)
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, outcome = running.pop(task), task.result()
                    if isinstance(outcome, SwarmError):
                        failed[number] = str(outcome)
                        gathering.failed(number, clock.monotonic_s())
                    else:
                        found[number] = outcome
                        gathering.answered(number, clock.monotonic_s())
            for task, number in running.items():
                task.cancel()
                failed[number] = "it was too late"
                self._calls.late(branches[number].made)
        lacking = len(gathering.lacking_rows)
        names = [str(branch.made.uid) for branch in branches]
        if lacking:
            told = "; ".join(
                f"{names[number]}: {why}" for number, why in list(failed.items())[:REASONS_SHOWN]
            )
            raise NotEnoughPeers(
                f"{lacking} samples got fewer than backward_k_min = {terms.backward_k_min} gradients: {told}"
            )
        parts = [(branches[number].places, found[number]) for number in sorted(found)]
        size = sum(tensor.nbytes for tensor in self._inputs)
        sums = await worked(self._pool, size, lambda: add_up(self._inputs, parts))
        return sums, PassReport(
            asked=tuple(names),
            answered=tuple(names[number] for number in sorted(found)),
            failed={names[number]: why for number, why in failed.items()},
            short_samples=lacking,
            seconds=clock.monotonic_s() - begun_s,
        )

    async def _call(
        self, branch: ExpertCall, gradients: Sequence[torch.Tensor | None], deadline_s: float, again: bool
    ) -> Sequence[torch.Tensor | None] | SwarmError:
        places, made = branch.places, branch.made
        inputs = await rows_of(self._pool, self._inputs, places.rows)
        size = sum(one.nbytes for one in gradients if one is not None)
        cut = await worked(
            self._pool,
            size,
            lambda: [one[places.rows, places.columns] if one is not None else None for one in gradients],
        )
        if again:
            made = with_new_request_id(made)
        try:
            tensors = GradientPass(inputs, cut)
            answer = await self._calls.backward(
                made, tensors, deadline_s=deadline_s, travel=self._terms.travel
            )
        except SwarmError as error:
            return error
        return answer.gradients
