"""From a prepared request to its response: JSON when all is done, or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import Cancelled
from .answering import PromptAnswers
from .asked import Constraints, MemoryRequest, Prompt
from .errors import error_body
from .facts import BUILD_INFO
from .formats.answer import Ended, Format, Head
from .responses import Json
from .schema import Generation
from .slots import SlotPool
from .sse import DONE, HEADERS, MEDIA_TYPE, PING, encode
from .state import ServerState
from .telling import Told

T = TypeVar("T")

_CLIENT_GONE: Final = 499  # nobody sees it; it stands in the log


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be answered."""

    generation: Generation
    prompts: Sequence[tuple[Prompt, Constraints]]
    memory: MemoryRequest
    format: Format
    parses: bool = False  # the answers are read as messages


async def respond(state: ServerState, pool: SlotPool, request: Request, asked: Asked) -> Response:
    """Answers. A client that goes away ends its answers, and what was read for them is kept.

    Raises ApiError or KvmemError for what goes wrong before a stream has begun.
    """
    work = _Work(state, pool, asked)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        if not asked.generation.stream:
            finals = await _unless(gone, work.finals())
            if finals is not None:
                return Json(asked.format.whole(work.head, finals))
            work.end()
            return Response(status_code=_CLIENT_GONE)
        first = await _unless(gone, work.next())
        if first is None:
            work.end()
            return Response(status_code=_CLIENT_GONE)
        if first.error is not None:
            work.end()
            raise first.error
        return EventStream(work, first)
    except BaseException:
        work.end()
        raise
    finally:
        gone.cancel()


class _Work:
    """The answers of one request, each prompt's in a slot of its own."""

    def __init__(self, state: ServerState, pool: SlotPool, asked: Asked) -> None:
        self.asked: Final = asked
        self._pool: Final = pool
        generation = asked.generation
        self.head: Final = Head(generation, state.facts.name, BUILD_INFO, parses=asked.parses)
        self._told: Final[asyncio.Queue[Told]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(told: Told) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(self._told.put_nowait, told)

        self._answers: Final = [
            PromptAnswers(
                state,
                pool,
                self.head,
                prompt,
                constraints,
                asked.memory,
                first_index=i * generation.n_cmpl,
                tell=tell,
            )
            for i, (prompt, constraints) in enumerate(asked.prompts)
        ]
        self.n_left = len(asked.prompts) * generation.n_cmpl
        self._tell: Final = tell
        self._tasks: Final = [asyncio.create_task(self._start(answers)) for answers in self._answers]

    async def _start(self, answers: PromptAnswers) -> None:
        """Waits for a slot."""
        try:
            slot = await self._pool.acquire(self.asked.generation.id_slot, self)
        except Exception as error:
            self._tell(answers.failed(error))
            return
        slot.running = answers
        try:
            self._pool.run(lambda: answers.run(slot))
        except RuntimeError as error:  # the server ends
            self._pool.release(slot)
            self._tell(answers.failed(error))

    async def next(self) -> Told:
        """What comes next. Of answers that are complete, `n_left` counts what follows."""
        told = await self._told.get()
        if told.final is not None:
            self.n_left -= 1
        return told

    async def finals(self) -> list[Ended]:
        """All answers, in order. Raises the first error."""
        found: list[Ended] = []
        while self.n_left:
            told = await self.next()
            if told.error is not None:
                raise told.error
            if told.final is not None:
                found.append(told.final)
        return sorted(found, key=lambda final: final.index)

    def end(self) -> None:
        """Nobody wants the rest."""
        for task in self._tasks:
            task.cancel()
        for answers in self._answers:
            answers.end()


class EventStream(Response):
    """The response of a stream, which notices when its client has gone."""

    media_type = MEDIA_TYPE

    def __init__(self, work: _Work, first: Told) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.headers["content-type"] = MEDIA_TYPE
        self._work = work
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._work.end()
            for task in (gone, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for chunk in self._chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[bytes]:
        work, form = self._work, self._work.asked.format
        interval = work.asked.generation.sse_ping_interval
        told = self._first
        waiting: asyncio.Task[Told] | None = None
        try:
            while True:
                if told.error is not None:
                    if not isinstance(told.error, Cancelled):
                        yield form.error(error_body(told.error)).encode()
                    return
                chunk = self._chunk(told)
                if chunk:
                    yield chunk
                if not work.n_left:
                    break
                waiting = asyncio.create_task(work.next())
                while not (await asyncio.wait((waiting,), timeout=interval if interval > 0 else None))[0]:
                    yield PING
                told, waiting = waiting.result(), None
            if form.ends_with_done:
                yield DONE
        finally:
            if waiting is not None:
                waiting.cancel()

    def _chunk(self, told: Told) -> bytes:
        work, form = self._work, self._work.asked.format
        if told.final is not None:
            return encode(form.last(work.head, told.state, told.final))
        return b"" if told.piece is None else encode(form.partial(work.head, told.state, told.piece))


async def _disconnected(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None if the client goes away before."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
