"""From Redis to the storyteller: asks in their turn, words to stop, the lease on what it holds.

Taking moves an ask into this storyteller's pending list; a beat every second renews the hold, and whoever is silent
for `LEASE_S` loses it. All of that is Lua (`storyteller/scripts`): each call is one atomic step, safe to repeat.
Blocking reads have a connection of their own and never hold an ask, so an interrupted one strands nothing.

Errors of the connection are the caller's: every method may raise `redis.RedisError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from storyteller import wire
from storyteller.wire import Key

BLOCK_MS = 1000


@dataclass(frozen=True, slots=True)
class Taken:
    """An ask in this storyteller's hands."""

    story: str
    ask: bytes  # a wire.Ask; decoded by the caller, so that one bad ask harms no other
    attempt: int
    is_cancelled: bool
    crashes: int  # storytellers that died with it in their hands
    waited_ms: int  # since it was accepted
    told: Sequence[wire.Told]  # by earlier attempts


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did."""

    put_back: int
    dead: int
    expired: int
    cancelled: int
    failed: int  # put back, and no storyteller left to go on
    waiting: int
    oldest_ms: int


class Inbox:
    """One storyteller's side of the queue, under the name that Redis knows it by."""

    def __init__(self, redis: Redis, blocking: Redis, name: str, deadline_s: float) -> None:
        self.name = name
        # redis-py types its answers as unions of all protocols and versions; here it is bytes, by `protocol=2`.
        self._redis: Any = redis
        self._blocking: Any = blocking
        self._deadline_ms = int(deadline_s * 1000)
        scripts = ("take", "beat", "sweep", "handback")
        self._take, self._beat, self._sweep, self._handback = (
            redis.register_script(wire.script(script)) for script in scripts
        )
        self._seen: dict[str, bytes] = {}  # stream -> the last entry heard of

    async def listen(self) -> tuple[bool, list[str], list[wire.Question]]:
        """Waits up to a second; returns whether there are new asks, stories to cancel, and questions."""
        if not self._seen:
            self._seen = await self._last_entries()
        try:
            answer = await self._blocking.xread(self._seen, count=100, block=BLOCK_MS)
        except ResponseError:
            self._seen = {}
            raise
        asks, cancels, questions = False, [], []
        for raw_name, entries in answer or []:
            name = raw_name.decode()
            self._seen[name] = entries[-1][0]
            if name == Key.ASKS:
                asks = True
            elif name == Key.CANCELS:
                cancels = [fields[b"story"].decode() for _, fields in entries]
            else:
                questions = _questions(entries)
        return asks, cancels, questions

    async def take(self, count: int, held: Sequence[str]) -> tuple[list[Taken], int]:
        """Up to `count` asks, in the order of their turns, and how many had expired instead.

        `held`: all stories in this storyteller's hands; what Redis counts among them besides comes first, again.
        """
        taken, expired = await self._take(args=[self.name, count, self._deadline_ms, *held])
        return [
            Taken(
                story=story.decode(),
                ask=ask,
                attempt=attempt,
                is_cancelled=cancelled == b"1",
                crashes=int(crashes),
                waited_ms=waited,
                told=_told(entries),
            )
            for story, ask, attempt, cancelled, crashes, waited, entries in taken
        ], expired

    async def beat(self, house: wire.House, age_ms: int, held: Sequence[tuple[str, int]]) -> dict[str, str]:
        """Renews the lease on `held` stories and attempts; says what became of each.

        `age_ms` is the time since the last progress. The answers are those of `beat.lua`.
        """
        flat = [value for pair in held for value in pair]
        answers = await self._beat(args=[self.name, wire.encode(house), age_ms, *flat])
        return {story: answer.decode() for (story, _), answer in zip(held, answers, strict=True)}

    async def sweep(self) -> Swept:
        """Puts back what silent storytellers held, and ends what waited for too long."""
        return Swept(*await self._sweep(args=[self._deadline_ms]))

    async def hand_back(self) -> None:
        """Gives back all stories that it holds, first in the queue, and forgets this storyteller's name."""
        await self._handback(args=[self.name])

    async def answer(self, question: str, num_tokens: int) -> None:
        """Tells the one who asked how many tokens a prompt has; -1: it cannot be given to this model."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(Key.ANSWER + question, num_tokens).expire(Key.ANSWER + question, 10)
            await pipe.execute()

    async def others_live(self) -> bool:
        """Whether another storyteller made progress of late and takes asks."""
        seconds, micros = await self._redis.time()
        since = seconds * 1000 + micros // 1000 - wire.PRESENCE_S * 1000
        live = [name for name in await self._redis.zrangebyscore(Key.LIVE, since, "+inf") if name.decode() != self.name]
        houses = await self._redis.hmget(Key.HOUSES, live) if live else []
        return any(house and not wire.decode(wire.House, house).draining for house in houses)

    async def _last_entries(self) -> dict[str, Any]:
        """Where each stream ends now. Asks from before are found by the first `take`, marks of cancelled ones too."""
        seen = {}
        for name in (Key.CANCELS, Key.QUESTIONS, Key.ASKS):
            last = await self._redis.xrevrange(name, count=1)
            seen[name] = last[0][0] if last else b"0-0"
        return seen


def _questions(entries: Sequence[tuple[bytes, Any]]) -> list[wire.Question]:
    questions = []
    for _, fields in entries:
        # One that cannot be read is not answered; whoever asked goes on without.
        with contextlib.suppress(msgspec.DecodeError, KeyError):
            questions.append(wire.decode(wire.Question, fields[b"question"]))
    return questions


def _told(entries: Sequence[tuple[bytes, Any]]) -> list[wire.Told]:
    told = []
    for _, flat in entries:
        entry = wire.read_entry(dict(zip(flat[::2], flat[1::2], strict=True)))
        if isinstance(entry, wire.Told):
            told.append(entry)
    return told
