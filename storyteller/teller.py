"""Between the queue and the engine: turns asks into stories, and what the engine writes into told text.

Runs on the event loop, beside the engine's thread. Five tasks, one owner (`run`): `_hear` waits for news from Redis,
`_take` fills free places, `_flush` sends what was written, `_beat` renews the lease, `_sweep` tidies up after others.
While Redis is away the engine goes on; what it writes stays in each tale, which is bounded by its max_tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from redis.exceptions import RedisError

from storyteller import metrics, wire
from storyteller.config import Config
from storyteller.desk import Desk, UntellableError
from storyteller.engine import Engine, Report
from storyteller.inbox import Inbox, Taken
from storyteller.outbox import Outbox
from storyteller.story import BLOCK
from storyteller.tale import Tale

log = logging.getLogger("storyteller")

FLUSH_S = 0.05
"""Running text goes out so often: often enough to read along, a third of the cost of one message a token."""
BEAT_S = 1.0


class Teller:
    """All stories in this storyteller's hands."""

    def __init__(self, config: Config, desk: Desk, inbox: Inbox, outbox: Outbox) -> None:
        self.is_draining = False
        self.beat_at = 0.0  # when Redis last answered a beat
        self._config = config
        self._desk = desk
        self._inbox = inbox
        self._outbox = outbox
        self._tales: dict[str, Tale] = {}
        self._news = asyncio.Event()  # there may be asks to take, or places for them
        self._due = asyncio.Event()  # something should go out before the next flush is due
        self._flushed_at = 0.0
        self._story_s = 0.0  # moving average of a story's time in the batch
        self._begun_at: dict[str, float] = {}
        self._stopped_early: deque[str] = deque(maxlen=1000)  # stories to cancel that are not here, or not yet
        self.engine: Engine

    async def run(self) -> None:
        """Until cancelled. A Redis that is away is waited for, with growing pauses; anything else is raised."""
        async with asyncio.TaskGroup() as tasks:
            for step, pause in ((self._hear, 0.0), (self._take, 0.0), (self._flush, 0.0)):
                tasks.create_task(self._repeat(step, pause))
            tasks.create_task(self._repeat(self._beat, BEAT_S))
            tasks.create_task(self._repeat(self._sweep, 1.0))

    async def drain(self, limit_s: float) -> int:
        """Takes no more asks; finishes stories only if nobody else can. Returns how many are left to hand back."""
        self.is_draining = True
        until = time.monotonic() + limit_s
        while self._tales and time.monotonic() < until:
            with contextlib.suppress(RedisError, OSError):
                # Said first: of two that leave in the same moment, one at least sees that the other does too.
                await self._beat()
                if await self._inbox.others_live():
                    break
            await asyncio.sleep(0.1)
        return len(self._tales)

    async def hand_back(self) -> None:
        """Sends what is written, then gives the rest back. To be called when the engine has stopped."""
        for tale in self._tales.values():
            self._cut(tale)
        await self._send()
        await self._inbox.hand_back()

    def report(self, report: Report) -> None:
        """What the engine's step brought; called on the event loop."""
        self._count(report)
        for story, token in report.told:
            tale = self._tales.get(story.id)
            # Another attempt at the same story may be here by now; the words of this one are not for it.
            if tale is not None and tale.story is story:
                tale.push(token)
                if tale.is_eager:
                    self._cut(tale)
        for story in report.ended:
            tale = self._tales.get(story.id)
            if tale is not None and tale.story is story:
                self._cut(tale, story.finish_reason)
        if report.ended:
            self._news.set()

    def _cut(self, tale: Tale, ending: wire.FinishReason | None = None) -> None:
        try:
            ended = tale.cut(ending)
        except Exception:  # whatever a tokenizer makes of these tokens: it is the end of this story, not of others
            log.exception("the text of story %s cannot be told", tale.story.id)
            tale.give_up("its text cannot be told")
            ended = "failed"
        if ended:
            metrics.stories.labels(ended).inc()
            metrics.story_tokens.observe(tale.num_tokens)
            took = time.monotonic() - self._begun_at.pop(tale.story.id, time.monotonic())
            self._story_s += (took - self._story_s) * (0.1 if self._story_s else 1.0)
            if ending is None:  # a stop string: the engine does not know yet
                self.engine.end(tale.story, ended)
        if tale.unsent:
            self._due.set()

    async def _repeat(self, step: Callable[[], Awaitable[None]], pause: float) -> None:
        this, failures = asyncio.current_task(), 0
        # Asked each time: `asyncio.wait_for` of Python 3.11, which redis-py uses, swallows a cancellation that comes in
        # the same moment as what it waits for.
        while this is not None and not this.cancelling():
            try:
                await step()
                failures = 0
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            except (RedisError, OSError) as error:
                failures += 1
                metrics.redis_errors.inc()
                if failures in (1, 10, 100):
                    log.warning("Redis: %s; trying again", error)
                await asyncio.sleep(min(2.0, 0.1 * 2 ** min(failures, 6)) * random.uniform(0.5, 1.0))

    async def _hear(self) -> None:
        asks, cancels, questions = await self._inbox.listen()
        if asks:
            self._news.set()
        for story in cancels:
            if story in self._tales:
                self.engine.end(self._tales[story].story, "cancelled")
            else:
                self._stopped_early.append(story)
        for question in questions:
            await self._inbox.answer(question.question, self._desk.measure(question))

    async def _take(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._news.wait()
        self._news.clear()
        while not self.is_draining and (free := self.engine.num_free) > 0:
            taken, expired = await self._inbox.take(free, list(self._tales))
            metrics.stories.labels("expired").inc(expired)
            for one in taken:
                if not one.told:
                    metrics.queue_wait.observe(one.waited_ms / 1000)
                self._begin(one)
            if len(taken) < free:
                break

    def _begin(self, taken: Taken) -> None:
        """Hands a taken ask to the engine; one that cannot be told ends at once, and harms nobody."""
        try:
            ask = wire.decode(wire.Ask, taken.ask)
            tale = self._desk.tale(ask, taken)
            failure = ""
        except (msgspec.DecodeError, UntellableError) as error:
            tale, failure = self._desk.unreadable(taken), str(error)
        except Exception:  # a tokenizer may raise anything; that too is this ask's ending, not the storyteller's
            log.exception("the ask of story %s cannot be told", taken.story)
            tale, failure = self._desk.unreadable(taken), "this ask cannot be told"
        if taken.story in self._tales:  # an attempt that is over, though nobody has said so here yet
            self._lose(self._tales[taken.story])
        self._tales[taken.story] = tale
        self._begun_at[taken.story] = time.monotonic()
        if failure:
            tale.failure = failure
            self._cut(tale, "failed")
        elif taken.is_cancelled or taken.story in self._stopped_early:
            self._cut(tale, "cancelled")
        elif tale.story.num_remaining <= 0:
            self._cut(tale, "length")
        else:
            self.engine.begin(tale.story)

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._due.wait()
        self._due.clear()
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self._flushed_at = time.monotonic()
            for tale in self._tales.values():
                self._cut(tale)
        await self._send()

    async def _send(self) -> None:
        tellings = [telling for tale in self._tales.values() for telling in tale.unsent]
        if not tellings:
            return
        answers = await self._outbox.tell(tellings)
        for telling, answer in zip(tellings, answers, strict=True):
            tale = self._tales.get(telling.story)
            if tale is None or tale.attempt != telling.attempt:
                continue
            tale.unsent.remove(telling)
            if answer != "told":
                self._lose(tale)
            elif isinstance(telling.content, wire.Ending):
                del self._tales[telling.story]

    def _lose(self, tale: Tale) -> None:
        """Another storyteller has this story, or all data was lost: not a word more of it from here."""
        tale.is_closed = True
        tale.unsent.clear()
        self._tales.pop(tale.story.id, None)
        self._begun_at.pop(tale.story.id, None)
        self.engine.end(tale.story, "cancelled")

    async def _beat(self) -> None:
        age = time.monotonic() - self.engine.progress_at
        if age > wire.LEASE_S:
            return  # the engine is stuck: let others have its stories
        held = self._held()
        answers = await self._inbox.beat(self._house(), int(age * 1000), held)
        self.beat_at = time.monotonic()
        for story, attempt in held:
            tale, answer = self._tales.get(story), answers[story]
            if tale is None or tale.attempt != attempt or tale.is_closed:
                continue
            if answer == "lost":
                self._lose(tale)
            elif answer != "held":
                self.engine.end(tale.story, "cancelled")

    async def _sweep(self) -> None:
        swept = await self._inbox.sweep()
        metrics.queue_depth.set(swept.waiting)
        metrics.queue_oldest.set(swept.oldest_ms / 1000)
        metrics.redeliveries.inc(swept.put_back)
        metrics.dead_letters.inc(swept.dead)
        for reason, count in (
            ("failed", swept.dead + swept.failed),
            ("expired", swept.expired),
            ("cancelled", swept.cancelled),
        ):
            metrics.stories.labels(reason).inc(count)
        if swept.put_back or swept.dead:
            log.warning("took over from a silent storyteller: %d put back, %d given up", swept.put_back, swept.dead)
        if swept.waiting:
            self._news.set()

    def _held(self) -> list[tuple[str, int]]:
        return [(tale.story.id, tale.attempt) for tale in self._tales.values()]

    def _house(self) -> wire.House:
        scheduler = self.engine.scheduler
        return self._desk.house(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            story_s=round(self._story_s, 3),
            draining=self.is_draining,
        )

    def _count(self, report: Report) -> None:
        scheduler, step = self.engine.scheduler, report.step
        if step is not None and step.chunks:
            metrics.step_seconds.observe(report.seconds)
            metrics.step_batch_size.observe(len(step.chunks))
            metrics.tokens.labels("prefill").inc(step.num_prefill)
            metrics.tokens.labels("cached").inc(report.num_cached)
            metrics.tokens.labels("decode").inc(len(report.told))
        running = len(scheduler.running)
        metrics.batch_size.set(running)
        metrics.batch_fill.set(running / scheduler.batch_size)
        metrics.kv_tokens.labels("used").set(scheduler.blocks.num_held * BLOCK)
