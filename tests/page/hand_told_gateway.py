"""A gateway whose stories a test tells: the page over real HTTP, the game protocol over real WebSockets.

The test decides when each piece of text comes, when sockets drop and what goes wrong; frames are `gateway.wire`'s, so
that the page meets no other protocol here than at a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files

from aiohttp import web
from websockets import ConnectionClosed
from websockets.asyncio.server import Server, ServerConnection, serve

from gateway import wire

PAGE = files("gateway") / "page"
VOICES = {
    "hearth-keeper": wire.VoiceInfo("The Hearth Keeper", "Warm and unhurried; kindness finds a way."),
    "old-sailor": wire.VoiceInfo("Salt Marrow", "Storms, far islands, and every word of it true."),
    "court-bard": wire.VoiceInfo("Ilse the Bard", "Knights, oaths, and banners in the wind."),
    "night-watch": wire.VoiceInfo("The Night Watch", "Ghost stories, told low, for those still awake."),
    "tinker": wire.VoiceInfo("Pip the Tinker", "Tall tales in which nothing goes to plan."),
}
OPENING = "Come in from the dark and sit where it is warm."


@dataclass(eq=False)
class Tale:
    """One story: what was asked, what was told, who listens under which id."""

    name: str
    ask: wire.Ask
    told: str = ""
    done: wire.Done | None = None
    ears: list[tuple[ServerConnection, str]] = field(default_factory=list)

    async def _say(self, frames: dict[tuple[ServerConnection, str], wire.ServerFrame]) -> None:
        for (socket, _), frame in frames.items():
            await socket.send(wire.encode(frame))

    async def queued(self, position: int, eta_ms: int, opening: str | None = OPENING) -> None:
        await self._say({ear: wire.Queued(ear[1], self.name, position, eta_ms, opening) for ear in self.ears})

    async def tell(self, text: str) -> None:
        self.told += text
        await self._say({ear: self._text(ear[1], text) for ear in self.ears})

    async def end(self, finish_reason: wire.FinishReason = "stop", message: str | None = None) -> None:
        ears, self.ears = self.ears, []
        usage, timing = wire.Usage(31, len(self.told) // 4), wire.Timing(4, 41, 1630)
        seed = 7 if self.ask.seed is None else self.ask.seed
        self.done = wire.Done("", self.name, self._cursor(), finish_reason, usage, seed, timing, message)
        await self._say({ear: self._done(ear[1]) for ear in ears})

    async def attach(self, socket: ServerConnection, listen: wire.Listen) -> None:
        behind = 0 if listen.after is None else int(listen.after.partition(".")[0])
        if self.told[behind:]:
            await socket.send(wire.encode(self._text(listen.id, self.told[behind:])))
        if self.done:
            await socket.send(wire.encode(self._done(listen.id)))
        else:
            self.ears.append((socket, listen.id))

    def _cursor(self) -> str:
        return f"{len(self.told)}.{self.name}"

    def _text(self, id: str, text: str) -> wire.Text:
        return wire.Text(id, self.name, self._cursor(), text)

    def _done(self, id: str) -> wire.Done:
        assert self.done is not None
        return wire.Done(id, *(getattr(self.done, name) for name in self.done.__struct_fields__[1:]))


class Gateway:
    """What the test holds: asks and listens as they come, and switches for what goes wrong."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Tale] = asyncio.Queue()
        self.listened: asyncio.Queue[wire.Listen] = asyncio.Queue()
        self.hellos: asyncio.Queue[wire.Hello] = asyncio.Queue()
        self.tales: dict[str, Tale] = {}
        self.sockets: set[ServerConnection] = set()
        self.refusal: wire.Error | None = None  # answers the next ask
        self.door: wire.Close | None = None  # closes every hello with this
        self.position, self.eta_ms = 0, 0
        self.url = ""
        self.game_port = 0

    async def tale(self) -> Tale:
        """The next story that somebody asks for."""
        async with asyncio.timeout(10):
            return await self.asked.get()

    async def hello(self) -> wire.Hello:
        async with asyncio.timeout(10):
            return await self.hellos.get()

    async def listen(self) -> wire.Listen:
        """The next attachment; it has heard all that was told before this returns."""
        async with asyncio.timeout(10):
            return await self.listened.get()

    async def drop(self, code: int = 1012) -> None:
        for socket in list(self.sockets):
            await socket.close(code)

    async def say(self, frame: wire.ServerFrame) -> None:
        for socket in self.sockets:
            await socket.send(wire.encode(frame))

    async def game(self, socket: ServerConnection) -> None:
        hello = wire.decode_client(await socket.recv())
        assert isinstance(hello, wire.Hello)
        await self.hellos.put(hello)
        if self.door is not None:
            return await socket.close(self.door, "the guard did not know the token")
        limits = wire.Limits(unfinished_asks=2, max_tokens=200, voices=VOICES)
        await socket.send(wire.encode(wire.Welcome(wire.PROTOCOL, hello.player or "guest-1", limits)))
        self.sockets.add(socket)
        try:
            async for text in socket:
                await self._hear(socket, wire.decode_client(text))
        except ConnectionClosed:
            pass
        finally:
            self.sockets.discard(socket)
            for tale in self.tales.values():
                tale.ears = [ear for ear in tale.ears if ear[0] is not socket]
        return None

    async def _hear(self, socket: ServerConnection, frame: wire.ClientFrame) -> None:
        match frame:
            case wire.Ask(id=id) if self.refusal is not None:
                refusal, self.refusal = self.refusal, None
                said = wire.Error(refusal.code, refusal.message, refusal.temporary, id, refusal.retry_after_ms)
                await socket.send(wire.encode(said))
            case wire.Ask(id=id):
                tale = Tale(f"s{len(self.tales) + 1}", frame, ears=[(socket, id)])
                self.tales[tale.name] = tale
                await tale.queued(self.position, self.eta_ms)
                await self.asked.put(tale)
            case wire.Listen(id=id, story=story):
                if story in self.tales:
                    await self.tales[story].attach(socket, frame)
                else:
                    await socket.send(wire.encode(wire.Error("not_found", f"story: got {story!r}", False, id)))
                await self.listened.put(frame)
            case wire.Cancel(id=id):
                await self._cancel(socket, id)

    async def _cancel(self, socket: ServerConnection, id: str) -> None:
        for tale in self.tales.values():
            if (socket, id) in tale.ears and id == tale.ask.id:
                await tale.end("cancelled")
            elif (socket, id) in tale.ears:
                tale.ears.remove((socket, id))
                await socket.send(wire.encode(wire.Left(id, tale.name)))

    async def index(self, request: web.Request) -> web.Response:
        html = (PAGE / "index.html").read_text().replace("{{GAME_PORT}}", str(self.game_port))
        host = request.url.host
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            f"connect-src 'self' ws://{host}:{self.game_port} wss://{host}:{self.game_port}; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": policy})


@asynccontextmanager
async def hand_told_gateway() -> AsyncIterator[Gateway]:
    """A gateway that listens on free ports."""
    self = Gateway()
    app = web.Application()
    app.router.add_get("/", self.index)
    app.router.add_static("/page", str(PAGE))
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with serve(self.game, "127.0.0.1", 0) as server:
            self.game_port = port_of(server)
            yield self
    finally:
        await runner.cleanup()


def port_of(server: Server) -> int:
    return int(next(iter(server.sockets)).getsockname()[1])


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "model": "SmolLM2-135M-Instruct", "revision": "test"})
