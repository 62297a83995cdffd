"""Small calls that share one stream, because a unary gRPC call costs both ends together about 0.5 ms of
processor time, most of it per call and not per byte.

The caller keeps one stream open on every control connection. To a peer that it calls often it keeps another
one on the bulk path (`swarm.net.shared_calls`). Calls that are made while a message is being sent are
combined in the next message, and so are their answers. The busier a connection is, the less a call costs
(docs/decisions/0012). Each call keeps the properties of a separate call: a number, a status, cancellation,
and the limits of `Server`. Large requests, and methods with large replies, use separate gRPC calls, because
on this stream they would delay everything behind them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from swarm.core.errors import PeerError
from swarm.core.notify import ChangeEvent
from swarm.net.bulk_calls import CODES, BulkCall
from swarm.net.bulk_socket import BulkLost
from swarm.net.callers import CallsOf
from swarm.net.incoming import BulkContext, Context
from swarm.net.outgoing import sender_of
from swarm.net.room import PeerRoom
from swarm.net.rpc import Later
from swarm.wire.calls_pb2 import AnswerBatch, Call, CallBatch

CALLS_NAME = "/swarm.Node/Calls"
SHARED_REQUEST_BYTES_MAX = 64 << 10
SHARED_REPLY_BYTES_MAX = 4 << 20
_BATCH_BYTES = 256 << 10  # a message with this many bytes is full; a single answer may be larger
BATCH_CALLS_MAX = 256
# Size of a caller's message with names, numbers and cancellations: the last call of a full message may be the
# largest one.
BATCH_BYTES_MAX = _BATCH_BYTES + SHARED_REQUEST_BYTES_MAX + (128 << 10)
_BATCH_CANCELLED_MAX = 1024
_METHOD_CHARACTERS_MAX = 200
# Turns of the event loop that a message waits for further calls, while other calls are in progress.
_TURNS = 2
UNSENT_MAX = 1024  # queued answers at which the callee stops reading calls from a slow caller
_TURN_S = 0.01  # while a callee processes a message, it lets other tasks run at this interval
ANSWER_S_MAX = 20.0  # the stream of a caller that reads no answer for this long is closed

_UNKNOWN = grpc.StatusCode.UNKNOWN
_NOT_SERVED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)

Outcome = tuple[grpc.StatusCode, str, bytes]  # status, details of a failure, the reply


class SharedCallsUnavailable(Exception):
    """The other end does not accept shared calls, or no more streams of them. No call was handled: make each
    call separately.
    """


class ClosedLocally(Exception):
    """This end closed the stream while the call was in progress."""


class CallStream:
    """The caller's end of a shared stream. Calls are sent while `run` is running; `close` ends it."""

    def __init__(self, call: aio.StreamStreamCall[Any, Any] | BulkCall) -> None:
        """`call` is a stream of the method `CALLS_NAME`, begun for this object."""
        self.ended = False
        self._call: Any = call
        self._send = sender_of(call)
        self.is_retired = False  # no further call may be made
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._unsent: deque[tuple[int, str, bytes]] = deque()  # number, method, request
        self._cancelled: deque[int] = deque()
        self._wake = ChangeEvent()
        self._last = 0
        self.answers = 0  # messages with answers that have arrived
        self._is_writing = True  # the task that writes has something to do, has not begun, or has ended
        self._rest: Coroutine[Any, Any, None] | None = None  # sends the rest of a message

    async def call(self, method: str, request: bytes, timeout_s: float) -> Outcome:
        """Make a call and return its outcome, which is DEADLINE_EXCEEDED when none came in `timeout_s`.
        Raises SharedCallsUnavailable or ClosedLocally. Cancelling it cancels the handler.
        """
        loop = asyncio.get_running_loop()
        self._last += 1
        number = self._last
        answer: asyncio.Future[Outcome] = loop.create_future()
        self._waiting[number] = answer
        self._unsent.append((number, method, request))
        if not self._sends_at_once():
            self._wake.notify()
        timer = loop.call_later(timeout_s, _expire, answer)
        try:
            return await answer
        finally:
            timer.cancel()
            if self._waiting.pop(number, None) is not None:  # no answer came
                self._cancelled.append(number)
                self._wake.notify()
            if self.is_retired and not self._waiting:
                self.close()

    async def run(self) -> None:
        """Send and receive until the stream ends for any reason."""
        outcome: Outcome | None = (
            grpc.StatusCode.CANCELLED,
            "the peer takes no more calls on this connection",
            b"",
        )
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write())
                try:
                    outcome = await self._read() or outcome
                finally:
                    writer.cancel()
        except* aio.AioRpcError as errors:
            error = errors.exceptions[0]
            assert isinstance(error, aio.AioRpcError)
            outcome = (error.code(), error.details() or "", b"")
        except* (aio.BaseError, asyncio.InvalidStateError) as errors:
            outcome = (grpc.StatusCode.UNAVAILABLE, str(errors.exceptions[0]), b"")
        except* DecodeError:
            outcome = (
                grpc.StatusCode.FAILED_PRECONDITION,
                "its answers are not a swarm.wire.AnswerBatch",
                b"",
            )
        finally:
            self.close(outcome)

    def close(self, outcome: Outcome | None = None) -> None:
        """End the stream. Calls in progress end with this outcome, or raise ClosedLocally when there is none.
        Idempotent.
        """
        if self.ended:
            return
        self.ended = True
        self._call.cancel()
        for answer in self._waiting.values():
            if answer.done():
                continue
            if outcome is None:
                answer.set_exception(ClosedLocally())
            elif outcome[0] in _NOT_SERVED and not self.answers:
                answer.set_exception(SharedCallsUnavailable())
            else:
                answer.set_result(outcome)
        self._waiting.clear()
        self._unsent.clear()
        if self._rest is not None:
            self._rest.close()
            self._rest = None

    def retire(self) -> None:
        """End the stream when no call is in progress. No call may be made any more."""
        self.is_retired = True
        if not self._waiting:
            self.close()

    async def _read(self) -> Outcome | None:
        """Receive to the end of the stream. Return the failure that ended it; None if its callee ended it."""
        while True:
            raw = await self._call.read()
            if raw is aio.EOF:
                code = await self._call.code()
                return None if code is grpc.StatusCode.OK else (code, await self._call.details() or "", b"")
            self.answers += 1
            for answer in AnswerBatch.FromString(raw).answers:
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((CODES.get(answer.status, _UNKNOWN), answer.details, answer.reply))

    def _sends_at_once(self) -> bool:
        """Send the only call that is in progress, where the transport can do that without the task that
        writes. Return whether that was done.
        """
        if self._is_writing or len(self._waiting) > 1 or self._cancelled:
            return False
        assert isinstance(self._call, BulkCall)
        try:
            self._rest = self._call.begin_to_write(self.next_batch().SerializeToString())
        except aio.InternalError:
            return True  # the reader learns the reason
        self._is_writing = self._rest is not None
        return not self._is_writing

    async def _write(self) -> None:
        """Write queued calls. A failed write ends nothing: the reader learns the reason."""
        await self._call.wait_for_connection()
        try:
            while True:
                self._is_writing = not isinstance(self._call, BulkCall)
                await self._wake.wait()
                self._is_writing = True
                if self._rest is not None:
                    rest, self._rest = self._rest, None
                    await rest
                if len(self._waiting) > len(self._unsent):
                    await _let_others_queue()
                self._wake.clear()
                while self._unsent or self._cancelled:
                    await self._send(self.next_batch().SerializeToString())
        except (aio.InternalError, BulkLost):
            self._is_writing = True

    def next_batch(self) -> CallBatch:
        batch, size_bytes = CallBatch(), 0
        while self._unsent and size_bytes < _BATCH_BYTES and len(batch.calls) < BATCH_CALLS_MAX:
            number, method, request = self._unsent.popleft()
            if number in self._waiting:  # skip calls that were cancelled before they were sent
                batch.calls.add(number=number, method=method, request=request)
                size_bytes += len(request)
        while self._cancelled and len(batch.cancelled) < _BATCH_CANCELLED_MAX:
            batch.cancelled.append(self._cancelled.popleft())
        return batch


async def _let_others_queue() -> None:
    """Let other tasks queue their calls first, because a message costs as much as ten calls inside it. If no
    other calls are in progress on the connection, a call is sent at once.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _expire(answer: asyncio.Future[Outcome]) -> None:
    if not answer.done():
        answer.set_result((grpc.StatusCode.DEADLINE_EXCEEDED, "", b""))


class ServedCalls:
    """The callee's end of a shared stream.

    `handle(method, request)` is the RPC boundary and must not raise. `handle_now` does the same for calls
    that need no task, because they never wait, or for one thing only; for any other call it returns how many
    bytes of its answer are to be counted before it begins. `calls` counts those that are open: a call is open
    until its answer has been sent, so answers to a caller that does not read cannot accumulate. `room` counts
    their bytes.
    """

    def __init__(
        self,
        context: Context,
        handle: Callable[[str, bytes], Awaitable[Outcome]],
        handle_now: Callable[[str, bytes], Outcome | Later[Outcome] | int],
        calls: CallsOf,
        room: PeerRoom,
    ) -> None:
        self._context = context
        self._handle = handle
        self._handle_now = handle_now
        self._calls = calls
        self._room = room
        self._open: dict[int, asyncio.Future[Any]] = {}  # tasks, and what other calls wait for
        self._has_ended = False
        # number, outcome, whether the call was counted by `enter`
        self._unsent: deque[tuple[int, Outcome, bool]] = deque()
        self._wake = ChangeEvent()
        self._is_writing = True  # the task that writes has something to do, has not begun, or has ended
        # sends the rest of a message, with the size of its answers
        self._rest: tuple[Coroutine[Any, Any, None], int] | None = None
        self._below_limit = asyncio.Event()
        self._stopping = False

    @property
    def unsent(self) -> int:
        """Return the number of answers that wait to be sent."""
        return len(self._unsent)

    @property
    def is_stopping(self) -> bool:
        """Return whether no more calls are taken."""
        return self._stopping

    def stop(self) -> None:
        """Take no more calls, and end the stream when the last open call was answered."""
        self._stopping = True
        self._wake.notify()

    async def run(self) -> None:
        """Serve until the caller ends the stream. Raises PeerError when it breaks the protocol."""
        # Raised at the end: on early versions of Python 3.11, `except*` would raise it inside a group.
        broken: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(group))
                writer = group.create_task(self._write())
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                for one in (reader, writer, *self._open.values()):
                    one.cancel()
        except* PeerError as errors:
            broken = errors.exceptions[0]
        except* aio.BaseError:
            pass  # the connection broke, and the caller notices this by itself
        finally:
            self._has_ended = True
            if self._rest is not None:
                self._rest[0].close()
                self._room.release(self._rest[1])
            for one in list(self._open.values()):  # this task may have been cancelled, and then its group
                one.cancel()
            for _, outcome, counted in self._unsent:
                self._room.release(_answer_bytes(outcome))
                if counted:
                    self._calls.leave()
        if broken is not None:
            raise broken

    async def _read(self, group: asyncio.TaskGroup) -> None:
        while True:
            raw = await self._context.read()
            if raw is aio.EOF:
                return
            turn_ends_s = time.perf_counter() + _TURN_S
            try:
                batch = CallBatch.FromString(raw)
            except DecodeError:
                raise PeerError("a message of shared calls is not a swarm.wire.CallBatch") from None
            if len(batch.calls) > BATCH_CALLS_MAX or len(batch.cancelled) > _BATCH_CANCELLED_MAX:
                raise PeerError(f"at most {BATCH_CALLS_MAX} calls share a message, not {len(batch.calls)}")
            for call in batch.calls:
                if not self._room.fits():
                    await self._room.wait(0)
                if not self._calls.may_begin(call.method):  # nothing more of this caller is read meanwhile
                    await self._calls.wait_to_begin(call.method)
                self._take(call, group)
                if time.perf_counter() >= turn_ends_s:
                    await asyncio.sleep(0)
                    turn_ends_s = time.perf_counter() + _TURN_S
            for number in batch.cancelled:
                task = self._open.get(number)
                if task is not None:
                    task.cancel()
            while len(self._unsent) >= UNSENT_MAX:
                self._below_limit.clear()
                await self._below_limit.wait()

    def _take(self, call: Call, group: asyncio.TaskGroup) -> None:
        if call.number in self._open:
            raise PeerError(f"call {call.number} is open already")
        if len(call.method) > _METHOD_CHARACTERS_MAX:
            raise PeerError(f"the name of a method has at most {_METHOD_CHARACTERS_MAX} characters")
        if len(call.request) > SHARED_REQUEST_BYTES_MAX:
            raise PeerError(
                f"a shared call's request has at most {SHARED_REQUEST_BYTES_MAX} bytes, not "
                f"{len(call.request)}"
            )
        if self._stopping:
            self._put(call.number, (grpc.StatusCode.CANCELLED, "the peer is closing", b""), counted=False)
            return
        refusal = self._calls.enter()
        if refusal is not None:
            self._put(call.number, (grpc.StatusCode.RESOURCE_EXHAUSTED, refusal, b""), counted=False)
            return
        outcome = self._handle_now(call.method, call.request)
        if isinstance(outcome, Later):
            self._open[call.number] = outcome.ended
            outcome.ended.add_done_callback(functools.partial(self._answer, call, outcome))
        elif isinstance(outcome, int):
            task = self._open[call.number] = group.create_task(self._perform(call, outcome))
            task.add_done_callback(functools.partial(self._performed, call.number))
        else:
            self._put(call.number, _checked(call.method, outcome), counted=True)

    def _answer(self, call: Call, later: Later[Outcome], ended: asyncio.Future[Any]) -> None:
        """Answer a call for which no task waits."""
        del self._open[call.number]
        if ended.cancelled():
            later.withdraw()
        if ended.cancelled() or self._has_ended:
            self._calls.leave()
        else:
            outcome = _checked(call.method, later.reply())
            self._put(call.number, outcome, counted=True, at_once=not self._open)
        if self._stopping:
            self._wake.notify()

    async def _perform(self, call: Call, reserved_bytes: int) -> None:
        if reserved_bytes:
            await self._room.wait(reserved_bytes)
        try:
            outcome = _checked(call.method, await self._handle(call.method, call.request))
        finally:
            self._room.release(reserved_bytes)
        self._put(call.number, outcome, counted=True)

    def _performed(self, number: int, task: asyncio.Task[None]) -> None:
        """Count a call as ended if its task was cancelled before it began, because its coroutine did not run
        then.
        """
        del self._open[number]
        if task.cancelled():
            self._calls.leave()
        if self._stopping:
            self._wake.notify()

    def _put(self, number: int, outcome: Outcome, *, counted: bool, at_once: bool = False) -> None:
        self._unsent.append((number, outcome, counted))
        self._room.take(_answer_bytes(outcome))
        if not (at_once and self._sends_at_once()):
            self._wake.notify()

    def _sends_at_once(self) -> bool:
        """Send the only answer, where the transport can do that without the task that writes. Return whether
        that was done.
        """
        if self._is_writing or len(self._unsent) > 1:
            return False
        assert isinstance(self._context, BulkContext)
        raw, sent = self._next_batch()
        try:
            rest = self._context.begin_to_write(raw)
        except aio.BaseError:
            rest = None  # the reader learns it
        if rest is None:
            self._room.release(sent)
            return True
        self._rest, self._is_writing = (rest, sent), True
        return False

    async def _write(self) -> None:
        while not self._stopping or self._open or self._unsent:
            self._is_writing = not isinstance(self._context, BulkContext)
            await self._wake.wait()
            self._is_writing = True
            if len(self._open) > len(self._unsent):
                await _let_others_queue()
            self._wake.clear()
            while self._rest is not None or self._unsent:
                if self._rest is not None:
                    (writing, sent), self._rest = self._rest, None
                else:
                    raw, sent = self._next_batch()
                    writing = self._context.write(raw)
                try:
                    async with asyncio.timeout(ANSWER_S_MAX):
                        await writing
                except TimeoutError:
                    raise PeerError(f"it read no answer for {ANSWER_S_MAX:g} s") from None
                except BulkLost:
                    return
                finally:
                    self._room.release(sent)
                self._below_limit.set()

    def _next_batch(self) -> tuple[bytes, int]:
        """Return a message with queued answers, and their size in the queue, which stays reserved until it is
        written. Their calls are not open any more: a caller that has an answer may call again at once.
        """
        batch, size_bytes = AnswerBatch(), 0
        while self._unsent and size_bytes < _BATCH_BYTES and len(batch.answers) < BATCH_CALLS_MAX:
            number, (code, details, reply), was_counted = self._unsent.popleft()
            batch.answers.add(number=number, status=code.value[0], details=details, reply=reply)
            if was_counted:
                self._calls.leave()
            size_bytes += len(reply) + len(details)
        return batch.SerializeToString(), size_bytes


def _answer_bytes(outcome: Outcome) -> int:
    """Return the size of an answer in the queue, in bytes."""
    return len(outcome[1]) + len(outcome[2])


def _checked(method: str, outcome: Outcome) -> Outcome:
    if len(outcome[2]) <= SHARED_REPLY_BYTES_MAX:
        return outcome
    return (
        grpc.StatusCode.OUT_OF_RANGE,
        f"the reply has more than {SHARED_REPLY_BYTES_MAX} bytes: {method} needs a separate call",
        b"",
    )
