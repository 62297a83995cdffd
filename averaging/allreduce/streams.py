"""The streams of a round: this member's to reducers, on which its values go out and averages come back, and
those that other members opened here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from averaging.allreduce import wire
from averaging.allreduce.config import REASON_CHARACTERS_MAX
from averaging.allreduce.frames import FramedStream
from averaging.allreduce.logic import events as on
from averaging.reduction.framing import unpack
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.net.rpc import Stream

if TYPE_CHECKING:
    from averaging.allreduce.driver import RoundDriver

_WAITING_S = 2.0  # interval at which a reducer reports that it waits for values; below REDUCER_S
_BATCH_CHUNKS = 2  # chunks encoded in one call to the pool; larger: fewer calls, later first bytes


class ReducerStream:
    """This member's stream to one reducer."""

    def __init__(self, driver: RoundDriver, reducer: int) -> None:
        self._driver, self._reducer = driver, reducer
        self.refused = False  # the reducer accepts no more values of this member

    async def run(self) -> None:
        """Send this member's values, and take averages, until the reducer has finished the stream."""
        driver, place = self._driver, self._reducer
        came = functools.partial(driver.on_bytes, place, True)
        try:
            size_bytes = driver.machine.reducers.shard_bytes(place)
            async with driver.network.open_stream(driver.contact(place), size_bytes) as opened:
                stream = driver.network.framed(opened, came, functools.partial(driver.on_sent, place))
                await _side_by_side(self._send(stream), self._receive(stream))
        except NetworkError as error:
            driver.feed(on.ReducerStreamEnded(place, str(error), broken=True))
        except PeerError as error:
            driver.feed(on.ReducerStreamEnded(place, str(error)))
        else:
            driver.feed(on.ReducerStreamEnded(place))

    async def _send(self, stream: FramedStream) -> None:
        driver, place = self._driver, self._reducer
        kernels, offload = driver.kernels, driver.offload
        stream.begin(wire.opening(driver.group_id, kernels.codec, driver.plan_digest))
        chunks = kernels.plan.shard(place) if kernels.weights[kernels.own] > 0 else ()
        size = 1 if offload.inline else _BATCH_CHUNKS
        batches = [chunks[nth : nth + size] for nth in range(0, len(chunks), size)]
        ahead: asyncio.Future[list[bytes | int]] | None = None
        for nth, batch in enumerate(batches):
            messages = await (
                asyncio.shield(ahead) if ahead is not None else offload.work(kernels.encode, batch)
            )
            pipelined = not offload.inline and nth + 1 < len(batches)
            # while these are sent
            ahead = offload.start(kernels.encode, batches[nth + 1]) if pipelined else None
            for message in messages:
                if isinstance(message, int):
                    await driver.exclude_self(message)
                elif kernels.excluded_reason is None and not self.refused:
                    await driver.send(stream, message)
                    driver.feed(on.ContributionSent(place))
            if kernels.excluded_reason is not None or self.refused:
                break
        if kernels.excluded_reason is not None:
            await driver.send(stream, wire.withdrawal(kernels.excluded_reason))
        if not chunks or kernels.excluded_reason is not None or self.refused:
            await stream.finish()  # else the last chunk is the end

    async def _receive(self, stream: FramedStream) -> None:
        driver, place = self._driver, self._reducer
        while (message := await stream.receive()) is not None:
            driver.bytes_received += len(message)
            header, payload = unpack(message)
            if header.HasField("average"):
                average = header.average
                driver.on_average(place, average.chunk, payload, average.contributors, average.clipped)
            elif header.HasField("refusal"):
                driver.feed(on.RefusalArrived(place, header.refusal.reason[:REASON_CHARACTERS_MAX]))
            elif header.HasField("waiting"):
                driver.feed(on.WaitingArrived(place))
            elif header.HasField("left_out"):
                found = header.left_out
                driver.feed(on.LeftOutTold(found.place, found.reason[:REASON_CHARACTERS_MAX]))
            else:
                raise PeerError("it sent a message that only the opener of a stream sends")


class SenderStream:
    """A stream that another member opened here: its values come in, this member's averages go out."""

    def __init__(self, driver: RoundDriver, sender: int) -> None:
        self._driver, self._sender = driver, sender
        self._limit: asyncio.Timeout | None = None  # while it exchanges messages

    def end_after(self, left_s: float) -> None:
        """End the stream in `left_s` seconds: the round has ended here."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + left_s)

    async def serve(self, opened: Stream, first: memoryview) -> None:
        """Serve the stream to its end. `first`: the message that came with its opening. A PeerError refuses
        it, or says why the round failed.
        """
        driver, place = self._driver, self._sender
        driver.feed(on.SenderOpened(place))
        came = functools.partial(driver.on_bytes, place, False)
        stream = driver.network.framed(opened, came, functools.partial(driver.on_sent, place))
        stream.resume(first)
        try:
            await self._exchange(stream)
        except NetworkError as error:
            driver.feed(on.SenderStreamBroke(place, str(error)))
        except PeerError as error:
            if driver.running:
                driver.feed(on.SenderFailed(place, f"it broke the protocol: {error}"))
            raise
        except asyncio.CancelledError:  # gRPC raises this if the caller has left
            driver.feed(on.SenderStreamBroke(place, "its connection closed"))
            raise

    async def _exchange(self, stream: FramedStream) -> None:
        try:
            async with asyncio.timeout(None) as self._limit:
                await _side_by_side(self._take_contributions(stream), self._give_averages(stream))
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise PeerError(self._driver.why_over()) from None
        finally:
            self._limit = None

    async def _take_contributions(self, stream: FramedStream) -> None:
        driver, place = self._driver, self._sender
        # after its last chunk a sender sends nothing more; extra data is not read
        for _ in driver.own_chunks:
            message = await stream.receive()
            if message is None:
                break
            driver.bytes_received += len(message)
            if place in driver.machine.shard.left_out:
                continue  # data in transit when the sender was left out, of which it has been informed
            try:
                header, payload = unpack(message)
                if header.HasField("contribution"):
                    found = header.contribution
                    driver.on_contribution(place, found.chunk, payload, found.signature)
                elif header.HasField("withdrawal"):
                    reason = header.withdrawal.reason[:REASON_CHARACTERS_MAX]
                    driver.feed(on.SenderFailed(place, f"it withdrew: {reason}"))
                else:
                    raise PeerError("neither a contribution nor a withdrawal")
            except PeerError as error:
                driver.feed(on.SenderFailed(place, f"it broke the protocol: {error}"))
            while driver.machine.shard.is_ahead(place):
                await driver.news()
        driver.feed(on.SenderFinished(place))

    async def _give_averages(self, stream: Stream) -> None:
        driver, place = self._driver, self._sender
        given = 0  # number of averages checked so far
        was_informed = False
        named = set[int]()  # members whose absence was explained on this stream
        said_s = driver.network.now_s  # time of the last message
        while given < len(driver.own_chunks):
            if place in driver.refusals and not was_informed:
                was_informed = True
                await driver.send(stream, wire.refusal(driver.refusals[place]))
            elif given < len(driver.averages):
                for other, reason in driver.machine.left_out.items():
                    if other not in named:
                        named.add(other)
                        await driver.send(stream, wire.left_out(other, reason))
                await driver.send(stream, driver.averages[given])
                driver.given(given)
                given += 1
            else:
                await driver.news()
                if driver.network.now_s < said_s + _WAITING_S:
                    continue
                waited_for = driver.machine.shard.waited_for(driver.machine.contributes)
                if waited_for:
                    await driver.send(stream, wire.waiting(waited_for[0]))
            said_s = driver.network.now_s


async def _side_by_side(work: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None]) -> None:
    """Run both concurrently, `beside` in a separate task. The first error ends the other and is raised
    unchanged. A cancellation takes precedence over errors of peers at the same moment, which a task group
    would raise instead.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beside)
            await work
    except BaseExceptionGroup as group:
        error, task = first_error(group), asyncio.current_task()
        if isinstance(error, SwarmError) and task is not None and task.cancelling():
            raise asyncio.CancelledError from None
        raise error from None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to report: first bugs of this program, then faults of peers, then of the network."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(
        found,
        key=lambda error: 2 if isinstance(error, NetworkError) else 1 if isinstance(error, SwarmError) else 0,
    )
