"""The game's door: one handler per WebSocket, speaking the protocol of `gateway/wire.py`.

A connection is a `hello`, then any number of asks and listenings at once, each told by a task of its own. Whatever a
client sends, the worst that happens is an `error` frame. Whatever a client does not take, it costs a bounded amount of
memory for `SEND_S` seconds; then its connection is cut, and nobody else notices.

It does not know Redis: `stories.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from http import HTTPStatus
from typing import Any

import jwt
import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from gateway import metrics, wire
from gateway.config import Config
from gateway.stories import Accepted, Piece, Place, RefusedError, Stories
from gateway.strangers import Handshakes, Origins, bound
from gateway.wire import Close
from gateway.wishes import Wish, settings_of
from storyteller import wire as story_wire

log = logging.getLogger("gateway")

SEND_S = 10
"""A client that takes nothing for so long is too slow."""
CLOSE_S = 2
"""How long a closing handshake may take."""
HEARTBEAT_S = 20
MAX_LISTENINGS = 64
"""Listenings that one connection may have at once, asks not counted."""
RECONNECT_MS = (500, 3000)


class Game:
    """All game connections of this gateway."""

    def __init__(self, config: Config, stories: Stories, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._config = config
        self._stories = stories
        self._heartbeat_s = heartbeat_s
        self._players: set[Player] = set()
        self._server: Server | None = None
        self._hearts: asyncio.Task[None] | None = None
        self._origins = Origins(config)
        self._handshakes = Handshakes()
        self.is_draining = False

    async def start(self) -> None:
        """Opens the door. `OSError`: the port is taken."""
        self._server = await serve(
            self._handle,
            self._config.host,
            self._config.ws_port,
            process_request=self._admit,
            compression=None,  # 33 KiB a connection less, and frames are short
            max_size=wire.MAX_FRAME,
            max_queue=4,
            write_limit=16 * 1024,
            open_timeout=wire.HELLO_TIMEOUT_S,
            close_timeout=CLOSE_S,
            ping_interval=None,  # `_beat` does it, with a close code of the protocol
            server_header=None,
            backlog=4096,
        )
        self._hearts = asyncio.create_task(self._beat(), name="heartbeats")

    async def drain(self, limit_s: float) -> None:
        """No new asks; tells everybody to reconnect elsewhere; lets running stories end; closes all with 4000."""
        self.is_draining = True
        if self._server is None:
            return
        # The listening sockets close, the connections stay: `Server.close` works only once, so each is closed below.
        self._server.close(close_connections=False)
        for player in tuple(self._players):
            player.spawn(player.send(wire.Reconnect(RECONNECT_MS)))
        until = time.monotonic() + limit_s
        while self._players and time.monotonic() < until:
            idle = [player for player in self._players if not player.is_listening]
            await asyncio.gather(*(player.close(Close.DRAINING, "draining") for player in idle))
            await asyncio.sleep(0.05)
        await asyncio.gather(*(player.close(Close.DRAINING, "draining") for player in tuple(self._players)))
        if self._hearts is not None:
            self._hearts.cancel()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Who may shake hands at all."""
        if self.is_draining:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "draining\n")
        address = connection.remote_address
        if not self._handshakes.allow(str(address[0]) if address else ""):
            return connection.respond(HTTPStatus.TOO_MANY_REQUESTS, "too many handshakes from this address\n")
        # A header may come twice; then it is none that is allowed.
        origin, host = (", ".join(request.headers.get_all(name)) for name in ("Origin", "Host"))
        if not self._origins.allow(origin or None, host):
            return connection.respond(HTTPStatus.FORBIDDEN, "origin not allowed\n")
        return None

    async def _handle(self, socket: ServerConnection) -> None:
        metrics.connections.inc()
        bound(socket.transport)
        player = Player(socket, self._config, self._stories, self)
        self._players.add(player)
        try:
            await player.run()
        finally:
            self._players.discard(player)
            metrics.connections.dec()
            code = str(socket.close_code or 1006)
            metrics.closes.labels(player.closed_with or (code if code in metrics.CLOSE_CODES else "other")).inc()

    async def _beat(self) -> None:
        """Pings every connection once in `_heartbeat_s`, spread over time; closes those that answered no ping since."""
        while True:
            started = time.monotonic()
            for number, player in enumerate(tuple(self._players)):
                player.spawn(player.beat())
                if number % 50 == 49:
                    await asyncio.sleep(self._heartbeat_s / (len(self._players) / 50 + 1))
            await asyncio.sleep(max(0.1, self._heartbeat_s - (time.monotonic() - started)))


class Player:
    """One connection. Its tasks are its own: all end with it."""

    def __init__(self, socket: ServerConnection, config: Config, stories: Stories, game: Game) -> None:
        self.name: str | None = None
        self.closed_with = ""  # the code by which this side ended the connection, by a closing handshake or a cut
        self._socket = socket
        self._config = config
        self._stories = stories
        self._game = game
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: dict[str, str] = {}  # id -> story
        self._listenings: dict[str, tuple[str, asyncio.Task[None]]] = {}  # id -> story, task
        self._sending = asyncio.Lock()
        self._pong: asyncio.Future[float] | None = None

    @property
    def is_listening(self) -> bool:
        return bool(self._asks or self._listenings)

    async def run(self) -> None:
        try:
            if await self._welcome():
                async for frame in self._socket:
                    await self._take(frame)
        except ConnectionClosed:
            pass
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

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
        if frame.id in self._asks or frame.id in self._listenings:
            raise RefusedError("bad_request", f"id: expected one that is not in use, got {frame.id!r}")
        if isinstance(frame, wire.Listen):
            offset = _offset_of(frame)
            if len(self._listenings) >= MAX_LISTENINGS:
                raise RefusedError("rate_limited", f"expected at most {MAX_LISTENINGS} listenings at once", 1.0)
            if frame.after is not None:
                metrics.resumes.inc()
            task = self.spawn(self._tell_listener(frame.id, frame.story, offset))
            self._listenings[frame.id] = (frame.story, task)
            return
        if self._game.is_draining:
            raise RefusedError("busy", "this gateway is draining", RECONNECT_MS[0] / 1000)
        accepted = await self._stories.ask(_wish(frame, self.name))
        self._asks[frame.id] = accepted.story
        self.spawn(self._tell_asker(frame.id, accepted))

    async def _cancel(self, frame: wire.Cancel) -> None:
        if frame.id in self._asks:
            await self._stories.cancel(self._asks[frame.id])
        elif frame.id in self._listenings:
            story, task = self._listenings.pop(frame.id)
            task.cancel()
            await asyncio.wait((task,))
            await self.send(wire.Left(frame.id, story))
        else:
            raise RefusedError("not_found", f"id: expected one that is in use, got {frame.id!r}")

    async def _tell_asker(self, frame_id: str, accepted: Accepted) -> None:
        try:
            eta_ms = int(accepted.eta_s * 1000)
            await self.send(wire.Queued(frame_id, accepted.story, accepted.position, eta_ms, accepted.opening))
            await self._tell(frame_id, accepted.story, 0)
        finally:
            self._asks.pop(frame_id, None)

    async def _tell_listener(self, frame_id: str, story: str, offset: int) -> None:
        try:
            await self._tell(frame_id, story, offset)
        except RefusedError as error:
            self._listenings.pop(frame_id, None)
            await self._refuse(error, frame_id)
        finally:
            self._listenings.pop(frame_id, None)

    async def _tell(self, frame_id: str, story: str, offset: int) -> None:
        """Text as it comes, from a place on, and the ending."""
        async with contextlib.aclosing(self._stories.listen(story, offset)) as events:
            async for event in events:
                match event:
                    case Place(position, eta_s):
                        await self.send(wire.Queued(frame_id, story, position, int(eta_s * 1000)))
                    case Piece(text, end):
                        offset = end
                        await self.send(wire.Text(frame_id, story, story_wire.cursor(story, end), text))
                    case story_wire.Ending():
                        # The id is free before its ending is out: the client may use it again at once.
                        self._asks.pop(frame_id, None)
                        self._listenings.pop(frame_id, None)
                        await self.send(_done(frame_id, story, offset, event))


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
