"""Game clients that come back: each asks for one story and hears it to its ending, whatever breaks in between.

A player asks once, and from `queued` on knows its story; after any loss of its connection it goes on at the next of the
gateways, behind its last cursor. It trusts nothing: every frame is kept, and `check` compares what was heard with what
the story must be.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from gateway import wire

PATIENCE_S = 60
"""No ending for so long is a story that was lost."""
WORDS = ("dragon", "castle", "lamp", "star", "girl", "hill", "road", "hall")
TOKENS = 400


@dataclass
class Heard:
    """What one player heard of its story."""

    seed: int
    story: str = ""
    frames: list[wire.Text] = field(default_factory=list)
    done: list[wire.Done] = field(default_factory=list)
    refusals: list[wire.Error] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each frame came, and the ending
    resumes: int = 0
    asks: int = 0  # times that the ask was sent

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames)

    @property
    def longest_silence_s(self) -> float:
        return max((later - sooner for sooner, later in pairwise(self.times)), default=0.0)

    @property
    def cursor(self) -> str | None:
        return self.frames[-1].cursor if self.frames else None


def ask(seed: int, frame_id: str = "a", tokens: int = TOKENS) -> wire.Ask:
    words = (WORDS[seed % 8], WORDS[seed // 8 % 8])
    return wire.Ask(frame_id, words, seed=seed, max_tokens=tokens, ignore_end=True, temperature=1.0)


@asynccontextmanager
async def player(url: str, name: str) -> AsyncIterator[ClientConnection]:
    """A connection that was welcomed; cut without a word at the end."""
    socket = await connect(url, compression=None, open_timeout=10, max_size=None, proxy=None, ping_interval=None)
    try:
        await socket.send(wire.encode(wire.Hello(wire.PROTOCOL, player=name)))
        welcome = wire.decode_server(await socket.recv())
        assert isinstance(welcome, wire.Welcome), welcome
        yield socket
    finally:
        socket.transport.abort()


async def receive(socket: ClientConnection) -> wire.ServerFrame:
    return wire.decode_server(await asyncio.wait_for(socket.recv(), PATIENCE_S))


class Crowd:
    """Players that ask at once, each for its seed's story.

    `urls` is read at every connection, so it may change while they play. `is_endless`: each asks again until that is
    set to false.
    """

    def __init__(self, urls: Sequence[str], seeds: Iterable[int], *, is_endless: bool = False) -> None:
        self.urls = urls
        self.heard = [Heard(seed) for seed in seeds]
        self.is_endless = is_endless
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[Crowd]:
        """They play inside the block; it is left when each has its ending."""
        async with asyncio.timeout(PATIENCE_S + 30), asyncio.TaskGroup() as players:
            for turn, heard in enumerate(self.heard):
                players.create_task(self._play(turn, heard))
            yield self

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what the players hear."""
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), PATIENCE_S)

    async def until_told(self, frames: int = 3) -> None:
        """Until each story is well under way."""
        await self.until(lambda: all(len(heard.frames) >= frames for heard in self.heard))
        assert any(not heard.done for heard in self.heard), "the stories were over too early to be disturbed"

    @property
    def num_resumes(self) -> int:
        return sum(heard.resumes for heard in self.heard)

    @property
    def longest_silence_s(self) -> float:
        return max(heard.longest_silence_s for heard in self.heard)

    async def _play(self, turn: int, heard: Heard) -> None:
        for attempt in itertools.count():
            try:
                async with player(self.urls[(turn + attempt) % len(self.urls)], f"player-{heard.seed}") as socket:
                    while await self._tell(socket, heard):
                        if not self.is_endless:
                            return
                        heard = Heard(heard.seed)
                        self.heard.append(heard)
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError):
                await asyncio.sleep(0.05)  # a pause between tries, as any client makes

    async def _tell(self, socket: ClientConnection, heard: Heard) -> bool:
        """Until the ending; False where a refusal asks to try again."""
        if heard.story:
            heard.resumes += 1
            await socket.send(wire.encode(wire.Listen("l", heard.story, heard.cursor)))
        else:
            heard.asks += 1
            await socket.send(wire.encode(ask(heard.seed)))
        while True:
            frame = await receive(socket)
            self._changed.set()
            match frame:
                case wire.Queued(_, story):
                    heard.story = story
                case wire.Text():
                    heard.times.append(time.monotonic())
                    heard.frames.append(frame)
                case wire.Done():
                    heard.times.append(time.monotonic())
                    heard.done.append(frame)
                    return True
                case wire.Reconnect():
                    raise ConnectionError("the gateway is draining: on with the story elsewhere, at once")
                case wire.Error():
                    assert frame.temporary, frame
                    heard.refusals.append(frame)
                    await asyncio.sleep((frame.retry_after_ms or 100) / 1000)
                    return False


async def replay(url: str, story: str) -> tuple[str, wire.Done]:
    """A story from its beginning, at any gateway."""
    async with player(url, "replay") as socket:
        await socket.send(wire.encode(wire.Listen("l", story)))
        text = ""
        while True:
            frame = await receive(socket)
            if isinstance(frame, wire.Text):
                text += frame.text
            elif isinstance(frame, wire.Done):
                return text, frame
            else:
                assert isinstance(frame, wire.Queued), frame


async def check(crowd: Crowd, truth: dict[int, str]) -> None:
    """Nothing lost, nothing twice, one ending each, and the same story wherever it is heard again."""
    assert crowd.heard
    for number, heard in enumerate(crowd.heard):
        assert len(heard.done) == 1, heard.seed
        [done] = heard.done
        assert done.finish_reason == "length", done
        assert done.usage.completion_tokens == TOKENS
        assert done.seed == heard.seed
        cursors = [frame.cursor for frame in heard.frames]
        assert len(set(cursors)) == len(cursors), "a frame came twice"
        assert heard.text == truth[heard.seed], f"the story of seed {heard.seed} is another one"
        text, again = await replay(crowd.urls[number % len(crowd.urls)], heard.story)
        assert (text, again.finish_reason, again.cursor) == (heard.text, done.finish_reason, done.cursor)
