"""The gateway's side of Redis: ask for a story, cancel it, listen to it from any place on.

Everything that leaves this room is a story's text, its ending, its place in the queue, or a `RefusedError` with a code
of the game protocol. An answer, a resume after a drop and one more listener are the same thing here: `listen`.

While Redis is away asks are refused as `busy`; listeners wait, and go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway import metrics
from gateway.campfire import Campfire
from gateway.houses import Houses
from gateway.tellable import Tellable
from gateway.wishes import RefusedError, Wish
from storyteller import wire
from storyteller.wire import Key

log = logging.getLogger("gateway")

BLOCK_MS = 1000
WATCH_S = 1.0
ASK_S = 3.0
"""How long an ask is said again while its answer is lost or Redis is away."""
FORGET_S = 30
"""How long an ended story waits here for its asker to listen."""
ANSWER_S = 2
"""How long to wait for a storyteller to measure a prompt."""
MAX_QUESTIONS = 16
"""Prompts that are measured at once; each holds a connection to Redis meanwhile."""


@dataclass(frozen=True, slots=True)
class Accepted:
    story: str
    seed: int
    position: int
    eta_s: float
    opening: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """The story waits, with so many asks before it."""

    position: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of the story; `end` is the number of its characters up to the end of this piece."""

    text: str
    end: int


Event = Place | Piece | wire.Ending


class Stories:
    def __init__(self, redis: Redis, blocking: Redis, *, queue_limit: int, player_limit: int, grace_s: float) -> None:
        self.houses = Houses()
        self.name = secrets.token_hex(6)
        self.is_redis_there = False
        # redis-py types its answers as unions of all protocols and versions; here they are those of `protocol=2`.
        self._redis: Any = redis
        self._blocking: Any = blocking
        self._queue_limit = queue_limit
        self._player_limit = player_limit
        self._lease_ms = int((grace_s + 2 * WATCH_S) * 1000)  # a story counts as heard for so long after each watch
        self._measuring = asyncio.Semaphore(MAX_QUESTIONS)
        self._tellable = Tellable(self.houses, self._measure)
        self._fires: dict[str, Campfire] = {}
        self._unwanted: set[str] = set()  # stories to cancel, until Redis has heard of it
        self._woken: bytes | str = "0-0"
        self._ask, self._cancel, self._heard, self._sweep = (
            redis.register_script(wire.script(name)) for name in ("ask", "cancel", "heard", "sweep")
        )

    async def run(self) -> None:
        """Reads all stories that somebody here waits for. Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._read))
            tasks.create_task(self._repeat(self._watch))

    @property
    def unready(self) -> str:
        """Why no story could be told now; '' where one could."""
        return self.houses.unready if self.is_redis_there else "Redis does not answer"

    async def ask(self, wish: Wish) -> Accepted:
        """Puts a wish into the queue. `RefusedError` where it cannot be; the doors count those, with their own."""
        accepted = await self._accept(wish)
        metrics.asks.labels("accepted").inc()
        return accepted

    async def cancel(self, story: str) -> None:
        """Ends a story as soon as can be; its listeners hear of it through its ending."""
        self._unwanted.add(story)
        try:
            await self._cancel_unwanted()
        except (RedisError, OSError):
            metrics.redis_errors.inc()  # `_watch` says it again

    async def listen(self, story: str, offset: int = 0) -> AsyncGenerator[Event]:
        """The story behind its first `offset` characters: what was told, then what comes, then its ending.

        Raises:
            RefusedError: `not_found`, or `bad_request` for a place that the story has not reached.
        """
        fire = await self._join(story)
        fire.num_listeners += 1
        fire.was_heard = True
        metrics.listeners.inc()
        position = fire.position
        try:
            if offset > len(fire.text):
                await self._catch_up(fire)  # another gateway may have read on before this one
            if offset > len(fire.text):
                raise RefusedError("bad_request", f"after: expected a place up to {len(fire.text)}, got {offset}")
            while True:
                changed = fire.changed
                if offset < len(fire.text):
                    piece = fire.text[offset:]
                    offset += len(piece)
                    yield Piece(piece, offset)
                elif fire.ending is not None:
                    yield fire.ending
                    return
                elif fire.position not in (position, -1):
                    position = fire.position
                    yield Place(position, self.houses.eta_s(position))
                else:
                    await changed.wait()
        finally:
            fire.num_listeners -= 1
            metrics.listeners.dec()
            self._tidy(fire)

    async def _accept(self, wish: Wish) -> Accepted:
        await self._tellable.check(wish)
        story, seed = secrets.token_urlsafe(12), wish.seed if wish.seed is not None else secrets.randbelow(2**31)
        ask = wire.Ask(story, wish.prompt, seed, wish.settings, wish.voice, wish.player, wish.priority)
        ahead_us = wire.HIGH_S * 1_000_000 if wish.priority == "high" else 0
        # Read from the beginning, so that its first entry cannot come too early.
        fire = self._fires[story] = Campfire(story, is_ours=True)
        fire.num_listeners += 1  # held until the caller listens
        try:
            outcome, number, num_written = await self._put(story, ask, ahead_us)
        except (RefusedError, asyncio.CancelledError):
            # Nobody knows whether Redis has it; if it has, nobody waits for it.
            del self._fires[story]
            self._unwanted.add(story)
            raise
        finally:
            fire.num_listeners -= 1
        if outcome != b"accepted":
            del self._fires[story]
            raise self._refusal(outcome, number)
        eta_s = self.houses.eta_s(number, num_written)
        fire.promise(number, eta_s)
        house = self.houses.house
        voice = house.voices.get(wish.voice or house.default_voice) if house else None
        is_told = isinstance(wish.prompt, wire.Words | wire.Text)
        return Accepted(story, seed, number, eta_s, voice.opening if voice and voice.opening and is_told else None)

    async def _put(self, story: str, ask: wire.Ask, ahead_us: int) -> tuple[bytes, int, int]:
        """One atomic step, tried again under the same story where its answer was lost: it never counts twice."""
        args: list[Any] = [
            story,
            wire.encode(ask),
            ask.player or "",
            ask.seed,
            ahead_us,
            self._queue_limit,
            self._player_limit,
        ]
        until, pause_s = time.monotonic() + ASK_S, 0.05
        while True:
            try:
                outcome, number, num_written = await self._ask(args=[*args, self.name, self._lease_ms])
                return outcome, number, num_written
            except (RedisError, OSError) as error:
                metrics.redis_errors.inc()
                if time.monotonic() + pause_s > until:
                    raise RefusedError("busy", f"the queue cannot be reached ({type(error).__name__})", 2.0) from None
            await asyncio.sleep(pause_s)
            pause_s *= 2

    def _refusal(self, outcome: bytes, number: int) -> RefusedError:
        if outcome == b"busy":
            return RefusedError("busy", f"{number} asks are waiting already", self.houses.retry_after_s())
        return RefusedError(
            "rate_limited",
            f"expected at most {self._player_limit} unfinished stories a player, {number} are unfinished",
            self.houses.story_s,
        )

    async def _measure(self, wish: Wish) -> int | None:
        """How many tokens the prompt has, by any storyteller; `None` where none answers in time."""
        if self.houses.unready:
            return None
        question = wire.Question(secrets.token_hex(8), wish.prompt, wish.voice)
        async with self._measuring:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.xadd(Key.QUESTIONS, {"question": wire.encode(question)}, maxlen=1000)
                answer = await self._redis.blpop([Key.ANSWER + question.question], timeout=ANSWER_S)
                return int(answer[1]) if answer else None
        return None

    async def _join(self, story: str) -> Campfire:
        """The fire of a story, kindled from what Redis has of it; `RefusedError` where it has nothing."""
        if story in self._fires:
            return self._fires[story]
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.exists(Key.STORY + story).zrank(Key.WAITING, story).xrange(Key.TOLD + story)
                exists, rank, entries = await pipe.execute()
        except (RedisError, OSError):
            raise RefusedError("busy", "the stories cannot be reached", 2.0) from None
        if not exists:
            raise RefusedError(
                "not_found", f"story: expected one of the last {wire.RETENTION_S // 60} minutes"
            ) from None
        fire = self._fires.setdefault(story, Campfire(story, is_ours=False))
        if fire.last_id == "0-0":
            fire.move(-1 if rank is None else rank)
            for entry_id, fields in entries:
                fire.take_in(entry_id, wire.read_entry(fields))
        fire.num_listeners += 1  # or the reader that is woken would not look for it
        try:
            with contextlib.suppress(RedisError, OSError):
                async with self._redis.pipeline(transaction=True) as pipe:
                    wake = Key.WAKE + self.name
                    await pipe.xadd(wake, {"story": story}, maxlen=16).expire(wake, 3600).execute()
        finally:
            fire.num_listeners -= 1
        return fire

    async def _catch_up(self, fire: Campfire) -> None:
        """Reads now what the reader has not brought yet."""
        last = fire.last_id if isinstance(fire.last_id, str) else fire.last_id.decode()
        try:
            entries = await self._redis.xrange(Key.TOLD + fire.story, f"({last}")
        except (RedisError, OSError):
            raise RefusedError("busy", "the stories cannot be reached", 2.0) from None
        for entry_id, fields in entries:
            fire.take_in(entry_id, wire.read_entry(fields))

    async def _cancel_unwanted(self) -> None:
        for story in tuple(self._unwanted):
            await self._cancel(args=[story])
            self._unwanted.discard(story)

    def _tidy(self, fire: Campfire) -> None:
        """Forgets a story that nobody here needs; Redis has it still."""
        if fire.num_listeners == 0 and not fire.is_needed and fire.was_heard and self._fires.get(fire.story) is fire:
            del self._fires[fire.story]

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        this, failures = asyncio.current_task(), 0
        # Asked each time: `asyncio.wait_for` of Python 3.11, which redis-py uses, swallows a cancellation that comes in
        # the same moment as what it waits for.
        while this is not None and not this.cancelling():
            try:
                await step()
                failures = 0
            except (RedisError, OSError) as error:
                self.is_redis_there = False
                failures += 1
                metrics.redis_errors.inc()
                if failures in (1, 10, 100):
                    log.warning("Redis: %s; trying again", error)
                await asyncio.sleep(min(2.0, 0.1 * 2 ** min(failures, 6)) * random.uniform(0.5, 1.0))

    async def _read(self) -> None:
        """One blocking read over all stories that are needed; the wake stream ends it when there is one more."""
        wake = Key.WAKE + self.name
        places = {Key.TOLD + fire.story: fire.last_id for fire in self._fires.values() if fire.is_needed}
        answer = await self._blocking.xread({wake: self._woken, **places}, block=BLOCK_MS)
        for raw_name, entries in answer or []:
            name = raw_name.decode()
            if name == wake:
                self._woken = entries[-1][0]
                continue
            fire = self._fires.get(name.removeprefix(Key.TOLD))
            if fire is None:
                continue
            for entry_id, fields in entries:
                fire.take_in(entry_id, wire.read_entry(fields))
            self._tidy(fire)

    async def _watch(self) -> None:
        """Once a second: who is alive, where stories stand in the queue, which are lost; and that they are heard."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time().hgetall(Key.HOUSES).zrange(Key.LIVE, 0, -1, withscores=True)
            (seconds, micros), houses, progress = await pipe.execute()
        self.houses.update(
            {name.decode(): wire.decode(wire.House, house) for name, house in houses.items()},
            {name.decode(): at for name, at in progress},
            seconds * 1000 + micros / 1000,
        )
        if not self.is_redis_there:
            log.info("Redis answers")
        self.is_redis_there = True
        if self.houses.unready:  # storytellers do this while one lives
            await self._sweep(args=[int(self.houses.deadline_s * 1000)])
        await self._cancel_unwanted()
        await self._tend()
        await asyncio.sleep(WATCH_S)

    async def _tend(self) -> None:
        """Keeps the stories alive that somebody here listens to, and forgets those that nobody will."""
        for fire in tuple(self._fires.values()):
            fire.was_heard |= fire.ending is not None and time.monotonic() - fire.ended_at > FORGET_S
            self._tidy(fire)
        needed = [fire for fire in self._fires.values() if fire.is_needed and fire.is_known]
        heard = [fire for fire in needed if fire.num_listeners]
        alone = [fire for fire in needed if not fire.num_listeners]
        for fires, lease_ms in ((heard, self._lease_ms), (alone, 0)):
            if fires:
                places = await self._heard(args=[lease_ms, *(fire.story for fire in fires)])
                for fire, place in zip(fires, places, strict=True):
                    if place == -2:
                        fire.fail("the story was lost with Redis' data")
                        self._tidy(fire)
                    else:
                        fire.move(place)
