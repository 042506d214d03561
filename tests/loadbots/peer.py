"""A hand-made gateway for the bots: real sockets, the real frames, and one fault at a time.

It tells stories from the seed alone, keeps them for `listen`, and misbehaves as `fault` says. It is a peer to try the
bots' eyes on, not a model of the gateway.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from gateway.wire import (
    Ask,
    Cancel,
    ClientFrame,
    Done,
    Error,
    FinishReason,
    Hello,
    Limits,
    Listen,
    Queued,
    Reconnect,
    ServerFrame,
    Text,
    Timing,
    Usage,
    Welcome,
    decode_client,
    encode,
)  # fmt: skip


class Story:
    def __init__(self, name: str, seed: int, pieces: list[str]) -> None:
        self.name = name
        self.seed = seed
        self.pieces = pieces
        self.told = 0  # pieces written so far
        self.cancelled = asyncio.Event()
        self.news = asyncio.Condition()
        self.ending: FinishReason | None = None


class Peer:
    """`url` is where it listens; `asks` and `listens` are what came."""

    def __init__(self, fault: str = "", pieces: int = 8, pause: float = 0.002) -> None:
        self.fault = fault
        self.pieces = pieces
        self.pause = pause
        self.asks: list[Ask] = []
        self.listens: list[Listen] = []
        self.players: list[str] = []
        self.stories: dict[str, Story] = {}
        self.url = ""
        self.server: Server | None = None
        self._next_ask = asyncio.Event()
        self.left_to_refuse = 3  # "busy" only
        self.cut = 0  # sockets cut by "cut"

    async def asked(self) -> None:
        """Until the next ask comes."""
        self._next_ask.clear()
        await self._next_ask.wait()

    async def serve(self, socket: ServerConnection) -> None:
        hello = decode_client(await socket.recv())
        assert isinstance(hello, Hello)
        if self.fault == "unauthorized":
            await socket.close(4501, "expected a token")
            return
        if self.fault == "nonsense hello":
            await socket.send("hello yourself")
            return
        self.players.append(hello.player or "")
        await self.send(socket, Welcome(1, hello.player or "", Limits()))
        async with asyncio.TaskGroup() as group:
            running: dict[str, Story] = {}
            try:
                async for data in socket:
                    self.answer(socket, decode_client(data), running, group)
            except ConnectionClosed:
                pass

    def answer(
        self, socket: ServerConnection, frame: ClientFrame, running: dict[str, Story], group: asyncio.TaskGroup
    ) -> None:
        if isinstance(frame, Ask):
            self.asks.append(frame)
            self._next_ask.set()
            group.create_task(self.ask(socket, frame, running, group))
        elif isinstance(frame, Listen):
            self.listens.append(frame)
            group.create_task(self.listen(socket, frame))
        elif isinstance(frame, Cancel) and frame.id in running:
            running[frame.id].cancelled.set()

    async def ask(
        self, socket: ServerConnection, ask: Ask, running: dict[str, Story], group: asyncio.TaskGroup
    ) -> None:
        if self.fault == "busy" and self.left_to_refuse:
            self.left_to_refuse -= 1
            await self.send(socket, Error("busy", "the queue is full", True, ask.id, 20))
            return
        if self.fault == "forbidden":
            await self.send(socket, Error("forbidden", "not you", False, ask.id))
            return
        assert ask.seed is not None
        rolled = random.Random(ask.seed if self.fault != "unrepeatable" else len(self.asks))
        number = min(self.pieces, ask.max_tokens or self.pieces)
        pieces = [rolled.choice((" the", " dragon", " sat", " quietly", " ünder", " 🐉")) for _ in range(number)]
        if self.fault == "cut character":
            pieces[2:4] = [" x\ufffd", "\ufffd y"]
        story = Story(f"s{len(self.stories)}", ask.seed, pieces)
        self.stories[story.name] = running[ask.id] = story
        await self.send(socket, Queued(ask.id, story.name, 0, 5))
        group.create_task(self.write(story))
        await self.tell(socket, ask.id, story, 0, live=True)

    async def write(self, story: Story) -> None:
        for _ in story.pieces:
            await asyncio.sleep(self.pause)
            if story.cancelled.is_set():
                break
            async with story.news:
                story.told += 1
                story.news.notify_all()
        async with story.news:
            story.ending = "cancelled" if story.cancelled.is_set() else "length"
            story.news.notify_all()

    async def listen(self, socket: ServerConnection, listen: Listen) -> None:
        story = self.stories.get(listen.story)
        if story is None or self.fault == "no replay":
            await self.send(socket, Error("not_found", "no such story", False, listen.id))
            return
        await self.tell(socket, listen.id, story, int(listen.after or "0"), live=False)

    async def tell(self, socket: ServerConnection, request: str, story: Story, at: int, *, live: bool) -> None:
        fault = self.fault if live else ""
        while True:
            async with story.news:
                while at >= story.told and story.ending is None:
                    await story.news.wait()
            if at >= story.told and story.ending:
                break
            at += 1
            if at == 4 and await self.misbehave(socket, fault, request, story):
                return
            if not (fault == "lost" and at == 4):
                await self.send(socket, Text(request, story.name, str(at), story.pieces[at - 1]))
            if fault == "repeated" and at == 4:
                await self.send(socket, Text(request, story.name, str(at), story.pieces[at - 1]))
        done = self.done(request, story, fault)
        await self.send(socket, done)
        if fault == "two dones":
            await self.send(socket, done)

    async def misbehave(self, socket: ServerConnection, fault: str, request: str, story: Story) -> bool:
        """Whether this telling is over."""
        if fault == "nonsense":
            await socket.send('{"type":"text","id":7}')
        elif fault == "not utf-8":
            await socket.send(b"\xff\xfe", text=True)
        elif fault == "mortal":
            assert self.server is not None
            self.server.close(close_connections=False)
            socket.transport.abort()
        elif fault in ("cut", "drain") and not self.cut:
            self.cut += 1
            if fault == "cut":
                socket.transport.abort()
            else:
                await self.send(socket, Reconnect((10, 30)))
                return False
        elif fault != "silent":
            return False
        return True

    def done(self, request: str, story: Story, fault: str) -> Done:
        tokens = {"wrong usage": 9999, "no usage": 0}.get(fault, story.told)
        seed = 1 if fault == "other seed" else story.seed
        assert story.ending is not None
        return Done(
            request, story.name, str(len(story.pieces) + 1), story.ending, Usage(5, tokens), seed, Timing(0, 1, 2)
        )  # fmt: skip

    async def send(self, socket: ServerConnection, frame: ServerFrame) -> None:
        try:
            await socket.send(encode(frame))
        except ConnectionClosed:
            return


@asynccontextmanager
async def peer(fault: str = "", pieces: int = 8, pause: float = 0.002) -> AsyncIterator[Peer]:
    here = Peer(fault, pieces, pause)
    async with serve(here.serve, "127.0.0.1", 0, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        here.url = f"ws://127.0.0.1:{port}"
        here.server = server
        yield here
        server.close(close_connections=True)
