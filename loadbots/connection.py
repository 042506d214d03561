"""One player's socket to a gateway: connecting within a deadline, the hello, frames in and out, reconnecting.

A lost connection is tried again, on the next of the `--url` addresses, with growing jittered pauses until the
player's patience ends. `RefusedError` and `GoneError` are final: the player leaves the crowd. `NonsenseError` costs
the story.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import time

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.protocol import State

from gateway.wire import (
    PROTOCOL,
    ClientFrame,
    Close,
    Error,
    Hello,
    Reconnect,
    ServerFrame,
    Welcome,
    decode_server,
    encode,
)

OPEN_S = 10.0
SEND_S = 10.0
CLOSE_S = 1.0
MAX_FRAME = 1024 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
NOT_AGAIN = (Close.TOO_BIG, *range(4500, 5000))


class RefusedError(Exception):
    """The gateway does not want this client back; `code` for the count of errors."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class GoneError(Exception):
    """Nothing answered for as long as the player's patience lasts."""


class NonsenseError(Exception):
    """The gateway sent something that is no frame of the protocol."""


class UnanswerableError(Exception):
    """The gateway refused one request for good; the connection lives on."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class LeavingError(Exception):
    """The moment has come at which a draining gateway asked this client to go elsewhere."""


class Connection:
    """A socket on which `welcome` was received."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.leave_at: float | None = None  # when to go elsewhere, by the monotonic clock; set by `reconnect`

    @property
    def closed(self) -> bool:
        return self._socket.state is not State.OPEN

    @property
    def leave_in(self) -> float:
        """Seconds until `leave_at`; 0 where nobody asked to leave."""
        return 0.0 if self.leave_at is None else max(0.0, self.leave_at - time.monotonic())

    async def send(self, frame: ClientFrame) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._socket.send(encode(frame))
        except TimeoutError:
            self.cut()
            raise GoneError(f"expected the gateway to take a frame within {SEND_S:g} s") from None

    async def receive(self) -> ServerFrame:
        """The next frame; the caller sets the deadline. `ConnectionClosed` where the socket ended, `LeavingError` when
        the moment to leave has come."""
        if self.leave_at is None:
            data = await self._socket.recv(decode=False)
        else:
            data = await self._receive_before_leaving()
        try:
            frame = decode_server(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            raise NonsenseError(f"expected a frame of the protocol, got {data[:80]!r}: {wrong}") from None
        if isinstance(frame, Reconnect) and self.leave_at is None:
            low, high = sorted(frame.in_ms)
            self.leave_at = time.monotonic() + random.uniform(low, high) / 1000
        return frame

    async def _receive_before_leaving(self) -> bytes:
        try:
            async with asyncio.timeout(self.leave_in):
                return await self._socket.recv(decode=False)
        except TimeoutError:
            raise LeavingError from None

    def cut(self) -> None:
        """Drop the socket without a word, as a crash or a lost network does."""
        self._socket.transport.abort()

    def stop_reading(self) -> None:
        self._socket.transport.pause_reading()

    def read_again(self) -> None:
        if not self._socket.transport.is_closing():
            self._socket.transport.resume_reading()

    async def close(self) -> None:
        """Say goodbye; a peer that takes nothing is left without."""
        try:
            async with asyncio.timeout(2 * CLOSE_S):
                await self._socket.close()
        except TimeoutError:
            self.cut()


async def open_connection(url: str, player: str, key: str | None) -> Connection:
    """Connect and say hello. `OSError`, `TimeoutError` and the exceptions of `websockets` pass through."""
    async with asyncio.timeout(OPEN_S):
        socket = await connect(
            url,
            compression=None,
            open_timeout=None,
            close_timeout=CLOSE_S,
            max_size=MAX_FRAME,
            proxy=None,
            user_agent_header="loadbots",
        )
        try:
            hello = Hello(PROTOCOL, token=sign(player, key)) if key else Hello(PROTOCOL, player=player)
            connection = Connection(socket)
            await connection.send(hello)
            answer = await connection.receive()
            if isinstance(answer, Error):
                raise RefusedError(answer.code, f"hello was answered with {answer.code}: {answer.message}")
            if not isinstance(answer, Welcome):
                raise NonsenseError(f"expected welcome, got {encode(answer)[:80]}")
        except BaseException:
            socket.transport.abort()
            raise
    return connection


async def reconnect(
    urls: tuple[str, ...], start: int, player: str, key: str | None, patience: float, *, first_pause: float
) -> Connection:
    """A connection to any of `urls`, the one at `start` first, within `patience` seconds."""
    deadline = time.monotonic() + patience
    pause, attempt, reason = first_pause, start, "no attempt was made"
    while time.monotonic() < deadline:
        await asyncio.sleep(min(random.uniform(0.5, 1.0) * pause, max(0.0, deadline - time.monotonic())))
        url = urls[attempt % len(urls)]
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + patience):
                return await open_connection(url, player, key)
        except ConnectionClosed as closed:
            raise_if_refused(closed)
            reason = f"{url} closed with {close_code(closed)}"
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as failed:
            reason = f"{url}: {explain(failed)}"
        pause, attempt = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause)), attempt + 1
    raise GoneError(f"no connection within {patience:g} s, last {reason}")


def raise_if_refused(closed: ConnectionClosed) -> None:
    """`RefusedError` where the close code says that this client shall not come back."""
    code = close_code(closed)
    if code in NOT_AGAIN:
        said = closed.rcvd.reason if closed.rcvd else ""
        raise RefusedError(f"closed_{code}", f"closed with {code} {said}".strip()) from None


def close_code(closed: ConnectionClosed) -> int:
    """The peer's close code, or what this side closed with; 1006 where the socket just ended."""
    frame = closed.rcvd or closed.sent
    return frame.code if frame else 1006


def explain(failed: BaseException) -> str:
    """A failure to connect in few words."""
    if isinstance(failed, TimeoutError):
        return f"no answer within {OPEN_S:g} s"
    if isinstance(failed, InvalidStatus):
        return f"expected a WebSocket, got HTTP {failed.response.status_code}"
    if isinstance(failed, InvalidHandshake):
        return f"expected a WebSocket, got something else ({failed})"
    if isinstance(failed, ConnectionRefusedError):
        return "connection refused"
    return str(failed) or type(failed).__name__


def sign(player: str, key: str) -> str:
    """A JWT (HS256) whose `sub` is the player, good for a day."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    now = int(time.time())
    claims: dict[str, object] = {"sub": player, "iat": now, "exp": now + 86400}
    signed = ".".join(part(json.dumps(piece).encode()) for piece in ({"alg": "HS256", "typ": "JWT"}, claims))
    return f"{signed}.{part(hmac.digest(key.encode(), signed.encode(), hashlib.sha256))}"
