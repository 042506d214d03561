"""One player of the game protocol: asks for a story, hears it to its ending, comes back after every drop.

`tell` always returns a record, whatever the gateway does: a player that can go on no more is `left`. Frames are
checked as they come; what only a replay can tell is `loadbots.replay`'s work, on the same connection.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from contextlib import suppress

from websockets.exceptions import ConnectionClosed

from gateway.wire import Ask, Done, Error, Left, Listen, Queued, Reconnect, ServerFrame, Text
from loadbots.asks import Wish
from loadbots.chaos import Fate
from loadbots.config import Config
from loadbots.connection import (
    FIRST_PAUSE_S,
    Connection,
    GoneError,
    LeavingError,
    NonsenseError,
    RefusedError,
    UnanswerableError,
    close_code,
    raise_if_refused,
    reconnect,
)
from loadbots.deeds import misbehave
from loadbots.replay import replay
from loadbots.told import Amendment, Phase, Telling, Told

TRY_AGAIN = ("busy", "rate_limited")
TRY_AGAIN_S = 0.5
"""The pause before a refused ask is made again where the gateway named none."""
REMEMBERED = 8
"""So many finished stories are remembered on a connection, to know their late frames."""


class Bot:
    """A player. One ask at a time; `drop` may be called at any moment by the crowd."""

    def __init__(self, config: Config, index: int) -> None:
        self.name = f"{config.run}-{index}"
        self.left = False  # no more asks: refused for good, or out of patience
        self.heard_frames = 0  # text frames so far, for the live view
        self.late: list[Amendment] = []  # what came for a story after its ending
        self._config = config
        self._turn = index  # which address is next
        self._connection: Connection | None = None
        self._ids = 0  # requests so far on all connections: an id is never used twice
        self._finished: deque[tuple[str, Wish]] = deque(maxlen=REMEMBERED)
        self._hurry = False  # the next reconnect is part of a storm

    async def connect(self) -> None:
        """The first connection; raises where there is none within the patience."""
        await self._connected()

    async def close(self) -> None:
        if self._connection:
            await self._connection.close()

    async def linger(self, seconds: float) -> None:
        """Hear what comes late, for so long."""
        telling = Telling(Wish(-1, -1, (), 0), Told(-1, -1, "check", 0.0), 0)
        try:
            async with asyncio.timeout(seconds):
                while self._connection:
                    self._late(await self._connection.receive(), telling)
        except (TimeoutError, ConnectionClosed, LeavingError, NonsenseError):
            pass

    async def hear_again(self, story: str) -> tuple[list[Text], Done]:
        """A finished story from its beginning; `UnanswerableError` where the gateway refuses."""
        for _ in range(2):
            with suppress(ConnectionClosed, LeavingError):
                return await replay(await self._connected(), self._next_id(), story)
        return await replay(await self._connected(), self._next_id(), story)

    def drop(self) -> None:
        """Part of a storm: cut the socket, come back at once."""
        if self._connection:
            self._hurry = True
            self._connection.cut()

    async def tell(self, wish: Wish, phase: Phase, intended: float, fate: Fate) -> Telling:
        """One story from ask to ending."""
        config = self._config
        telling = Telling(
            wish, Told(wish.player, wish.number, phase, intended, begun=time.monotonic()), config.max_tokens
        )
        told = telling.told
        try:
            while told.ended is None:
                await self._hear(telling, fate)
        except UnanswerableError as refused:
            told.given_up = refused.code
        except (RefusedError, GoneError) as gone:
            self.left = True
            told.fail(gone.code if isinstance(gone, RefusedError) else "connection")
        except NonsenseError as nonsense:
            told.fail("nonsense")
            told.faults.append(str(nonsense))
            self._forget()
        except TimeoutError:
            told.fail("silence")
            self._forget()
        if told.ended is None and telling.story is not None:
            told.faults.append("an accepted ask got no ending")
        if told.ended is None:
            told.ended = time.monotonic()
        return telling

    async def _hear(self, telling: Telling, fate: Fate) -> None:
        """Ask or resume, and hear as far as this connection carries."""
        told = telling.told
        connection = await self._connected()
        request = self._next_id()
        asked = telling.story is None
        if asked:
            told.sent = told.sent or time.monotonic()
        try:
            await connection.send(self._request(request, telling))
            told.resumes += not asked
            pause = await self._follow(connection, request, telling, fate)
        except ConnectionClosed as closed:
            telling.pause()
            told.unanswered += telling.story is None
            if close_code(closed) == 1007:
                raise NonsenseError("a text frame was not UTF-8") from None
            raise_if_refused(closed)
            pause = connection.leave_in
            self._forget()
        except LeavingError:
            telling.pause()
            pause = 0.0
            self._forget()
        await asyncio.sleep(pause)

    def _request(self, request: str, telling: Telling) -> Ask | Listen:
        if telling.story is not None:
            return Listen(request, telling.story, telling.cursors[-1] if telling.cursors else None)
        config = self._config
        return Ask(
            request,
            words=telling.wish.words,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            voice=config.voice,
            seed=telling.wish.seed,
            ignore_end=config.ignore_end,
        )

    async def _follow(self, connection: Connection, request: str, telling: Telling, fate: Fate) -> float:
        """Hear frames until the ending, or until a refused ask shall be made again: the pause before that."""
        told = telling.told
        due = fate.deed is not None and not (told.cancelled or told.stalled or told.resumes)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._config.silence) as silence:
            armed = loop.time()
            while told.ended is None:
                if due and telling.story is not None and told.frames >= fate.after_frames:
                    due = False
                    await misbehave(connection, request, telling, fate)
                frame = await connection.receive()
                now = time.monotonic()
                if now - armed > 1.0:
                    armed = loop.time()
                    silence.reschedule(armed + self._config.silence)
                if isinstance(frame, Text) and frame.id == request:
                    self.heard_frames += 1
                    telling.hear(frame.cursor, frame.text, now)
                elif isinstance(frame, Error) and frame.id in (request, None):
                    pause = self._refused(frame, telling)
                    if pause:
                        return pause
                else:
                    self._other(frame, request, telling, now)
        self._finished.append((request, telling.wish))
        return 0.0

    def _other(self, frame: ServerFrame, request: str, telling: Telling, now: float) -> None:
        """Frames that are neither text nor an error of the story at hand."""
        if isinstance(frame, Queued) and frame.id == request:
            telling.queue(frame)
        elif isinstance(frame, Done) and frame.id == request:
            telling.finish(frame, now, exact=self._config.ignore_end)
        elif not isinstance(frame, Reconnect | Left):
            self._late(frame, telling)

    def _late(self, frame: ServerFrame, telling: Telling) -> None:
        """A frame of a story that had its ending, or of none at all."""
        request = getattr(frame, "id", None)
        wish = next((wish for known, wish in self._finished if known == request), None)
        if wish is None:
            telling.told.errors["stray_frame"] += 1
        elif not isinstance(frame, Error):
            kind = type(frame).__name__.lower()
            repeated = Amendment(wish.player, wish.number, repeated=1, faults=[f"{kind} came after the ending"])
            self.late.append(repeated)

    def _refused(self, error: Error, telling: Telling) -> float:
        """The pause before asking again; 0 where the error changes nothing."""
        told = telling.told
        if told.cancelled and error.code == "not_found" and telling.story is not None:
            return 0.0  # the cancel came after the ending, which is on its way
        told.errors[error.code] += 1
        if telling.story is not None:
            raise UnanswerableError(error.code)
        told.refusals[error.code] += 1
        waited = time.monotonic() - (told.sent or told.intended)
        if error.code not in TRY_AGAIN or not error.temporary or waited > self._config.patience:
            raise UnanswerableError(error.code)
        pause = TRY_AGAIN_S if error.retry_after_ms is None else error.retry_after_ms / 1000
        return max(0.001, min(pause, self._config.patience) * random.uniform(1.0, 1.1))

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection and (connection.closed or connection.leave_at is not None):
            await asyncio.sleep(connection.leave_in)
            self._forget()
        if self._connection is None:
            config = self._config
            pause = 0.0 if self._hurry or (connection is None and not self._ids) else FIRST_PAUSE_S
            self._hurry = False
            self._connection = await reconnect(
                config.url, self._turn, self.name, config.auth_key, config.patience, first_pause=pause
            )
            self._turn += 1
        return self._connection

    def _forget(self) -> None:
        """Drop the connection and all that belonged to it."""
        if self._connection:
            self._connection.cut()
        self._connection = None
        self._finished.clear()

    def _next_id(self) -> str:
        self._ids += 1
        return f"r{self._ids}"
