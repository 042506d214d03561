"""The game's door: who may enter, heartbeats, and how all connections end when the gateway does.

What is said on a connection is `player.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from gateway import metrics, wire
from gateway.config import Config
from gateway.player import CLOSE_S, RECONNECT_MS, Player
from gateway.stories import Stories
from gateway.strangers import Handshakes, Origins, bound
from gateway.wire import Close

HEARTBEAT_S = 20


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
            idle = [player for player in self._players if not player.is_told]
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
        player = Player(socket, self._config, self._stories, lambda: self.is_draining)
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
