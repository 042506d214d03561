"""An ask over HTTP, from its acceptance to the last byte of its answer.

However an answer goes wrong (its client hangs up, takes nothing, or the gateway must end), its story is cancelled, so
that it holds no place in a batch for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from aiohttp import web

from gateway import metrics, openai
from gateway.openai import ApiError, Asked, BrokenOffError
from gateway.stories import Accepted, Event, Piece, Stories
from gateway.wishes import RefusedError
from storyteller import wire

SEND_S = 10
"""A client that takes nothing for so long is too slow."""


class Answers:
    """All answers that are being given."""

    def __init__(self, stories: Stories) -> None:
        self._stories = stories
        self._leashes: set[asyncio.Timeout] = set()  # one for each answer: to end it when the gateway must
        self._tasks: set[asyncio.Task[None]] = set()  # cancels on their way
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def give(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Asks, and answers in the shape that was asked for.

        Raises:
            RefusedError: the ask was not accepted.
            BrokenOffError: it was, but there is no answer; no byte of one is out.
        """
        accepted = await self._ask(asked)
        house = self._stories.houses.house
        answer = openai.Answer(
            story=accepted.story,
            model=house.model if house else asked.model or "",
            fingerprint=house.revision if house else None,
            is_chat=asked.is_chat,
            include_usage=asked.include_usage,
        )
        stream = Stream(request)
        is_over = False
        try:
            async with self._leash(), contextlib.aclosing(self._stories.listen(accepted.story)) as events:
                response = await (_stream(answer, events, stream) if asked.is_stream else _whole(answer, events))
            is_over = True
            return response
        except BrokenOffError as error:
            if stream.response is None:
                raise
            return await stream.end(error.body)
        finally:
            if not is_over:
                self._keep(self._stories.cancel(accepted.story))

    async def drain(self, limit_s: float) -> None:
        """Waits until all answers are given; ends those that are not by then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), limit_s)
        for leash in self._leashes:
            leash.reschedule(asyncio.get_running_loop().time())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), 1)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)

    async def _ask(self, asked: Asked) -> Accepted:
        """Asks to the end even if the client hangs up meanwhile: an ask that was accepted must be cancelled then."""
        asking = asyncio.create_task(self._stories.ask(asked.wish))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._keep(self._take_back(asking))
            raise

    async def _take_back(self, asking: asyncio.Task[Accepted]) -> None:
        with contextlib.suppress(RefusedError):
            await self._stories.cancel((await asking).story)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def _leash(self) -> AsyncIterator[None]:
        """Counts an answer, and breaks it off when the gateway must end."""
        try:
            async with asyncio.timeout(None) as leash:
                self._leashes.add(leash)
                self._is_idle.clear()
                try:
                    yield
                finally:
                    self._leashes.discard(leash)
                    if not self._leashes:
                        self._is_idle.set()
        except TimeoutError:
            raise BrokenOffError("busy", "the gateway is draining", retry_after_s=1) from None
        except RefusedError as error:
            raise BrokenOffError(error.code, error.message, retry_after_s=error.retry_after_s) from None


class Stream:
    """Server-sent events to one client. `response` is there as soon as a byte may be out."""

    def __init__(self, request: web.Request) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request

    async def send(self, *events: bytes) -> None:
        async with deadline(self._request):
            if self.response is None:
                self.response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
                self.response.content_type = "text/event-stream"
                self.response.charset = "utf-8"
                await self.response.prepare(self._request)
            await self.response.write(b"".join(b"data: %b\n\n" % event for event in events))

    async def end(self, *events: bytes) -> web.StreamResponse:
        await self.send(*events, b"[DONE]")
        assert self.response is not None
        return self.response


@contextlib.asynccontextmanager
async def deadline(request: web.Request) -> AsyncIterator[None]:
    """Cuts the connection of a client that takes nothing for too long, and raises `ConnectionResetError`."""
    try:
        async with asyncio.timeout(SEND_S):
            yield
    except TimeoutError:
        metrics.slow_clients.inc()
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client takes nothing") from None


async def _whole(answer: openai.Answer, events: AsyncGenerator[Event]) -> web.StreamResponse:
    texts: list[str] = []
    async for event in events:
        match event:
            case Piece(text):
                texts.append(text)
            case wire.Ending():
                _check(event)
                body = answer.whole("".join(texts), event)
                return web.Response(body=body, content_type="application/json")
    raise AssertionError("a story has an ending")


async def _stream(answer: openai.Answer, events: AsyncGenerator[Event], stream: Stream) -> web.StreamResponse:
    """Nothing is out before the first text or the ending, so that an ask which expired still gets its own status."""
    async for event in events:
        match event:
            case Piece(text):
                begin = answer.begin() if stream.response is None else []
                await stream.send(*begin, answer.text(text))
            case wire.Ending():
                _check(event)
                begin = answer.begin() if stream.response is None else []
                return await stream.end(*begin, *answer.end(event))
    raise AssertionError("a story has an ending")


def _check(ending: wire.Ending) -> None:
    if ending.finish_reason not in ("stop", "length"):
        raise BrokenOffError(ending.finish_reason, ending.message or f"the story was {ending.finish_reason}")


def refused(error: RefusedError) -> ApiError:
    """What the stories' room refused, as OpenAI's clients know it."""
    return ApiError(error.code, error.message, retry_after_s=error.retry_after_s)


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds for everybody, milliseconds for OpenAI's own clients.
        headers = {
            "Retry-After": str(max(1, math.ceil(error.retry_after_s))),
            "Retry-After-Ms": str(math.ceil(error.retry_after_s * 1000)),
        }
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(body=error.body, status=error.status, headers=headers, content_type="application/json")
