"""A game client that sends whatever it is told to and sees frames as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests import checkpoints

Frame = dict[str, Any]
WAIT_S = 30
FOR_EVER = {"max_tokens": checkpoints.FOR_EVER, "ignore_end": True}


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, frame: Frame | str | bytes) -> None:
        await self.socket.send(json.dumps(frame) if isinstance(frame, dict) else frame)

    async def hear(self) -> Frame:
        return dict(json.loads(await asyncio.wait_for(self.socket.recv(), WAIT_S)))

    async def answer(self, frame: Frame | str | bytes) -> Frame:
        """The next frame after this one."""
        await self.say(frame)
        return await self.hear()

    async def until(self, kind: str, frame_id: str | None = None) -> Frame:
        """The next frame of a kind; others are passed over."""
        while True:
            frame = await self.hear()
            if frame["type"] == kind and frame_id in (None, frame.get("id")):
                return frame

    async def ask(self, frame_id: str, **fields: Any) -> Frame:
        """The first answer to an ask: queued or error."""
        await self.say({"type": "ask", "id": frame_id, "words": ["dragon"], **fields})
        while (frame := await self.hear()).get("id") != frame_id:
            pass
        return frame

    async def begin(self, frame_id: str, **fields: Any) -> None:
        """An ask, until it waits no longer: its first words are there."""
        assert (await self.ask(frame_id, **fields))["type"] == "queued"
        await self.until("text", frame_id)

    async def closing(self) -> int:
        """The close code that comes, whatever comes before it."""
        try:
            while True:
                await self.hear()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 1006


@asynccontextmanager
async def door(url: str, **options: Any) -> AsyncIterator[Client]:
    """A connection that has not said hello yet."""
    async with connect(url, compression=None, ping_interval=None, proxy=None, **options) as socket:
        yield Client(socket)


@asynccontextmanager
async def player(url: str, name: str | None = None) -> AsyncIterator[Client]:
    """A connection that was welcomed."""
    async with door(url) as client:
        hello = {"type": "hello", "protocol": 1, **({"player": name} if name else {})}
        welcome = await client.answer(hello)
        assert welcome["type"] == "welcome"
        yield client
