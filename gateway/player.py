"""One game connection: `hello`, then any number of asks and listenings at once, each told by a task of its own.

Whatever a client sends, the worst that happens is an `error` frame. Whatever a client does not take, it costs a bounded
amount of memory for `SEND_S` seconds; then its connection is cut, and nobody else notices.

It does not know Redis: `stories.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jwt
import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from gateway import metrics, wire
from gateway.config import Config
from gateway.stories import Accepted, Piece, Place, Stories
from gateway.wire import Close
from gateway.wishes import RefusedError, Wish, settings_of
from storyteller import wire as story_wire

SEND_S = 10
"""A client that takes nothing for so long is too slow."""
CLOSE_S = 2
"""How long a closing handshake may take."""
MAX_LISTENINGS = 64
"""Listenings that one connection may have at once, asks not counted."""
RECONNECT_MS = (500, 3000)


@dataclass(eq=False)
class Telling:
    """A story told on a connection, under an id that is the client's own."""

    story: str
    is_ask: bool
    task: asyncio.Task[None] | None = None


class Player:
    """One connection. Its tasks are its own: all end with it."""

    def __init__(
        self, socket: ServerConnection, config: Config, stories: Stories, is_draining: Callable[[], bool]
    ) -> None:
        self.name: str | None = None
        self.closed_with = ""  # the code by which this side ended the connection, by a closing handshake or a cut
        self._socket = socket
        self._config = config
        self._stories = stories
        self._is_draining = is_draining
        self._tasks: set[asyncio.Task[None]] = set()
        self._tellings: dict[str, Telling] = {}  # by the client's id
        self._sending = asyncio.Lock()
        self._pong: asyncio.Future[float] | None = None

    @property
    def is_told(self) -> bool:
        """Whether a story is being told to it."""
        return bool(self._tellings)

    async def run(self) -> None:
        try:
            if await self._welcome():
                async for frame in self._socket:
                    await self._take(frame)
        except ConnectionClosed:
            pass
        finally:
            await _end(*self._tasks)

    def spawn(self, work: object) -> asyncio.Task[None]:
        """Runs a coroutine until it ends or the connection does; a closed connection is no error."""
        task: asyncio.Task[None] = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def send(self, frame: wire.ServerFrame) -> None:
        """Sends a frame, or cuts the connection where the client takes nothing for `SEND_S`."""
        try:
            # One at a time, so that the deadline is that of the frame which does not get through.
            async with self._sending, asyncio.timeout(SEND_S):
                await self._socket.send(wire.encode(frame))
        except TimeoutError:
            metrics.slow_clients.inc()
            self._cut(Close.TOO_SLOW)

    async def close(self, code: Close, reason: str) -> None:
        """A closing handshake, for a while; then the connection is cut."""
        self.closed_with = str(int(code))
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code, reason)
        except TimeoutError:
            self._socket.transport.abort()

    async def beat(self) -> None:
        """One ping; no pong since the last one, or a ping that does not even get out, ends the connection."""
        if self._pong is not None and not self._pong.done():
            await self.close(Close.HEARTBEAT, "no answer to a ping")
            return
        try:
            async with asyncio.timeout(SEND_S):
                self._pong = await self._socket.ping()  # type: ignore[assignment]
        except TimeoutError:
            metrics.slow_clients.inc()
            self._cut(Close.TOO_SLOW)

    def _cut(self, code: Close) -> None:
        # A closing handshake would wait behind what the client does not take.
        self.closed_with = str(int(code))
        self._socket.transport.abort()

    async def _guard(self, work: object) -> None:
        with contextlib.suppress(ConnectionClosed):
            await work  # type: ignore[misc]

    async def _welcome(self) -> bool:
        """The first frame, which must be a valid hello."""
        try:
            async with asyncio.timeout(wire.HELLO_TIMEOUT_S):
                raw = await self._socket.recv()
            frame = wire.decode_client(raw)
            if not isinstance(frame, wire.Hello):
                raise ValueError(f"expected hello as the first frame, got {type(frame).__name__.lower()}")
        except TimeoutError:
            await self.close(Close.NO_HELLO, f"expected hello within {wire.HELLO_TIMEOUT_S} s")
            return False
        except (msgspec.DecodeError, ValueError) as error:
            await self.close(Close.NO_HELLO, str(error)[:120])
            return False
        if frame.protocol != wire.PROTOCOL:
            await self.close(Close.UNSUPPORTED_PROTOCOL, f"expected protocol {wire.PROTOCOL}, got {frame.protocol}")
            return False
        try:
            self.name = self._identify(frame)
        except jwt.InvalidTokenError as error:
            await self.send(wire.Error("unauthorized", f"token: {error}", temporary=False))
            await self.close(Close.UNAUTHORIZED, str(error)[:120])
            return False
        await self.send(wire.Welcome(wire.PROTOCOL, self.name, self._limits()))
        return True

    def _identify(self, hello: wire.Hello) -> str:
        """The player's name; `jwt.InvalidTokenError` where a token is wanted and there is no good one."""
        if not self._config.auth_key:
            return hello.player or f"guest-{secrets.token_hex(4)}"
        if hello.token is None:
            raise jwt.InvalidTokenError("expected a token, got none")
        claims = jwt.decode(hello.token, self._config.auth_key, algorithms=["HS256"], options={"require": ["sub"]})
        if not claims["sub"]:
            raise jwt.InvalidTokenError("expected a player in sub, got an empty text")
        return str(claims["sub"])

    def _limits(self) -> wire.Limits:
        house = self._stories.houses.house
        voices = house.voices if house else {}
        return wire.Limits(
            unfinished_asks=self._config.player_limit,
            max_tokens=house.max_tokens if house else 0,
            voices={key: wire.VoiceInfo(voice.name, voice.manner) for key, voice in voices.items()},
        )

    async def _take(self, raw: str | bytes) -> None:
        """One frame after hello; answers with an error frame whatever is wrong with it."""
        frame_id, is_ask = None, False
        try:
            if isinstance(raw, bytes):
                raise RefusedError("bad_request", "expected a text frame, got a binary one")
            try:
                frame = wire.decode_client(raw)
            except msgspec.DecodeError as error:
                frame_id, is_ask = _gist_of(raw)
                raise RefusedError("bad_request", wire.explain(error, raw)) from None
            if isinstance(frame, wire.Hello):
                raise RefusedError("bad_request", "expected ask, cancel or listen, got a second hello")
            frame_id, is_ask = frame.id, isinstance(frame, wire.Ask)
            await self._do(frame)
        except RefusedError as error:
            if is_ask:
                metrics.asks.labels(error.code).inc()
            await self._refuse(error, frame_id)

    async def _refuse(self, error: RefusedError, frame_id: str | None) -> None:
        retry_after_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
        temporary = error.code in ("busy", "rate_limited")
        await self.send(wire.Error(error.code, error.message, temporary, frame_id, retry_after_ms))

    async def _do(self, frame: wire.Ask | wire.Cancel | wire.Listen) -> None:
        if isinstance(frame, wire.Cancel):
            await self._cancel(frame)
            return
        if frame.id in self._tellings:
            raise RefusedError("bad_request", f"id: expected one that is not in use, got {frame.id!r}")
        if isinstance(frame, wire.Listen):
            self._listen(frame)
            return
        if self._is_draining():
            raise RefusedError("busy", "this gateway is draining", RECONNECT_MS[0] / 1000)
        accepted = await self._stories.ask(_wish(frame, self.name))
        telling = self._tellings[frame.id] = Telling(accepted.story, is_ask=True)
        telling.task = self.spawn(self._tell_asker(frame.id, telling, accepted))

    def _listen(self, frame: wire.Listen) -> None:
        offset = _offset_of(frame)
        if sum(not telling.is_ask for telling in self._tellings.values()) >= MAX_LISTENINGS:
            raise RefusedError("rate_limited", f"expected at most {MAX_LISTENINGS} listenings at once", 1.0)
        if frame.after is not None:
            metrics.resumes.inc()
        telling = self._tellings[frame.id] = Telling(frame.story, is_ask=False)
        telling.task = self.spawn(self._tell(frame.id, telling, offset))

    async def _cancel(self, frame: wire.Cancel) -> None:
        telling = self._tellings.get(frame.id)
        if telling is None or telling.task is None:
            raise RefusedError("not_found", f"id: expected one that is in use, got {frame.id!r}")
        if telling.is_ask:
            await self._stories.cancel(telling.story)
            return
        self._free(frame.id, telling)
        await _end(telling.task)
        await self.send(wire.Left(frame.id, telling.story))

    def _free(self, frame_id: str, telling: Telling) -> None:
        """Lets the client use the id again; a later telling under the same id stays."""
        if self._tellings.get(frame_id) is telling:
            del self._tellings[frame_id]

    async def _tell_asker(self, frame_id: str, telling: Telling, accepted: Accepted) -> None:
        eta_ms = int(accepted.eta_s * 1000)
        await self.send(wire.Queued(frame_id, accepted.story, accepted.position, eta_ms, accepted.opening))
        await self._tell(frame_id, telling, 0)

    async def _tell(self, frame_id: str, telling: Telling, offset: int) -> None:
        """Text as it comes, from a place on, and the ending; or why there is none."""
        story = telling.story
        try:
            async with contextlib.aclosing(self._stories.listen(story, offset)) as events:
                async for event in events:
                    match event:
                        case Place(position, eta_s):
                            await self.send(wire.Queued(frame_id, story, position, int(eta_s * 1000)))
                        case Piece(text, end):
                            offset = end
                            await self.send(wire.Text(frame_id, story, story_wire.cursor(story, end), text))
                        case story_wire.Ending():
                            # Free before its ending is out: the client may use the id again at once.
                            self._free(frame_id, telling)
                            await self.send(_done(frame_id, story, offset, event))
        except RefusedError as error:
            self._free(frame_id, telling)
            await self._refuse(error, frame_id)
        finally:
            self._free(frame_id, telling)


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancels them until they have ended: a call of Redis that comes back in the same moment may swallow it once."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)


def _wish(frame: wire.Ask, player: str | None) -> Wish:
    if (frame.words is None) == (frame.prompt is None):
        raise RefusedError("bad_request", "expected either words or prompt, got both or neither")
    prompt = story_wire.Words(frame.words) if frame.words is not None else story_wire.Text(frame.prompt or "")
    return Wish(prompt, settings_of(frame), frame.voice, player, frame.seed, frame.priority)


def _offset_of(frame: wire.Listen) -> int:
    if frame.after is None:
        return 0
    try:
        return story_wire.offset_of(frame.story, frame.after)
    except ValueError as error:
        raise RefusedError("bad_request", f"after: expected a cursor of this story, got one that is {error}") from None


def _done(frame_id: str, story: str, offset: int, ending: story_wire.Ending) -> wire.Done:
    return wire.Done(
        id=frame_id,
        story=story,
        cursor=story_wire.cursor(story, offset),
        finish_reason=ending.finish_reason,
        usage=wire.Usage(ending.prompt_tokens, ending.completion_tokens),
        seed=ending.seed,
        timing=wire.Timing(ending.queue_ms, ending.first_text_ms, ending.total_ms),
        message=ending.message or None,
        unknown_words=tuple(ending.unknown_words.split()),
    )


class _Gist(msgspec.Struct):
    id: Any = None
    type: Any = None


def _gist_of(raw: str) -> tuple[str | None, bool]:
    """Of a frame that is wrong otherwise: its id, so that its client knows which it was, and whether it is an ask."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        gist = msgspec.json.decode(raw, type=_Gist)
        return gist.id if isinstance(gist.id, str) and len(gist.id) <= 64 else None, gist.type == "ask"
    return None, False
