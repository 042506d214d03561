"""Stories end early: cancelled at any moment, left alone, never begun. Each has one ending, and every place is free."""

from __future__ import annotations

import asyncio
import signal
import time

from websockets.asyncio.client import ClientConnection

from gateway import wire
from storyteller.wire import FINISH_REASONS, Key
from tests.processes import metric
from tests.reliability.crowd import ask, player, receive, replay
from tests.reliability.house import House
from tests.reliability.test_faults import Figure, until


def num_ended(stack: House) -> list[float]:
    """Endings counted by both gateways, and by both storytellers."""
    gateways = [metric(gateway.metrics(), "gateway_stories_total") for gateway in stack.gateways]
    tellers = [metric(teller.metrics(), "storyteller_stories_total") for teller in stack.storytellers]
    return [sum(gateways), sum(tellers)]


def gauges(stack: House) -> list[float]:
    """What must be zero when all is over."""
    found = []
    for teller in stack.storytellers:
        page = teller.metrics()
        found += [metric(page, "storyteller_batch_size"), metric(page, "storyteller_kv_tokens", state="used")]
    return [*found, *(metric(gateway.metrics(), "gateway_listeners") for gateway in stack.gateways)]


async def test_a_cancel_at_any_moment_gives_one_ending_and_frees_every_place(stack: House, figure: Figure) -> None:
    ended = num_ended(stack)
    reasons = dict.fromkeys(FINISH_REASONS, 0)
    stories: list[str] = []

    async def play(number: int) -> None:
        moment, tokens = number % 6, 40 if number % 6 == 4 else 400
        async with player(stack.urls[number % 2], f"fickle-{number}") as socket:
            frames: list[wire.ServerFrame] = []

            async def hear(kind: type[object]) -> None:
                while not frames or not isinstance(frames[-1], kind | wire.Done):
                    frames.append(await receive(socket))

            await socket.send(wire.encode(ask(number, tokens=tokens)))
            if moment > 0:
                await hear(wire.Queued)  # it waits, is being admitted, or runs already
            if moment > 1:
                await hear(wire.Text)
            if moment > 2:
                await asyncio.sleep(number / 200)  # anywhere in the middle of it, or just when it ends
            if moment == 5:
                await hear(wire.Done)
            await socket.send(wire.encode(wire.Cancel("a")))
            await hear(wire.Done)
            done = [frame for frame in frames if isinstance(frame, wire.Done)]
            assert len(done) == 1
            reasons[done[0].finish_reason] += 1
            stories.append(done[0].story)
            if moment == 5:
                refused = await receive(socket)
                assert isinstance(refused, wire.Error)
                assert refused.code == "not_found"
                assert done[0].finish_reason == "length"
            text = "".join(frame.text for frame in frames if isinstance(frame, wire.Text))
            again, ending = await replay(stack.urls[0], done[0].story)
            assert (again, ending.finish_reason) == (text, done[0].finish_reason)

    async with asyncio.TaskGroup() as players:
        for number in range(48):
            players.create_task(play(number))
    await until(stack.is_idle, "an empty queue")
    await until(lambda: not any(gauges(stack)), "gauges at zero")
    gateways, tellers = (after - before for before, after in zip(ended, num_ended(stack), strict=True))
    with stack.redis as redis:
        num_begun = sum(redis.hexists(Key.STORY + story, "begun") for story in stories)
    assert (gateways, tellers) == (48, num_begun), "each is counted once, by a storyteller only where one had begun it"
    assert reasons["cancelled"] >= 24
    assert reasons["length"] >= 8
    assert reasons["cancelled"] + reasons["length"] == 48
    figure(f"{reasons['cancelled']} cancelled, {reasons['length']} came to their end before")


async def test_a_cancel_while_redis_is_away_is_not_forgotten(stack: House) -> None:
    async with player(stack.urls[0], "patient") as socket:
        await socket.send(wire.encode(ask(1, tokens=1000)))
        while not isinstance(await receive(socket), wire.Text):
            pass
        for teller in stack.storytellers:
            teller.signal(signal.SIGSTOP)
        stack.stack.valkey.kill()
        await socket.send(wire.encode(wire.Cancel("a")))
        await until(lambda: not stack.gateways[0].is_ready(), "a gateway that misses Redis")
        await asyncio.to_thread(stack.start_redis)
        await until(lambda: stack.redis.hlen(Key.STORY + "x") == 0 and stack.redis.xlen(Key.CANCELS), "the cancel")
        for teller in stack.storytellers:
            teller.signal(signal.SIGCONT)
        while not isinstance(done := await receive(socket), wire.Done):
            pass
        assert done.finish_reason == "cancelled"


async def test_a_story_that_nobody_hears_any_more_ends_unless_somebody_else_listens(
    stack: House, figure: Figure
) -> None:
    impatient = stack.gateway(GATEWAY_GRACE_S="0", GATEWAY_PLAYER_LIMIT="40")
    await until(impatient.is_ready, "a gateway with no grace")
    stories: list[str] = []
    async with player(impatient.url, "leaver") as socket:
        for number in range(36):
            await socket.send(wire.encode(ask(number, f"a{number}", tokens=1000)))
        while len(stories) < 36:
            frame = await receive(socket)
            if isinstance(frame, wire.Queued) and frame.story not in stories:
                stories.append(frame.story)
        listening = asyncio.create_task(replay(stack.urls[0], stories[-1]))
        await until(lambda: metric(stack.gateways[0].metrics(), "gateway_listeners") == 1, "somebody else")
    left = time.monotonic()
    endings = [(await replay(stack.urls[1], story))[1].finish_reason for story in stories[:-1]]
    assert set(endings[-12:]) == {"cancelled"}
    assert time.monotonic() - left < 15
    _, done = await listening
    assert done.finish_reason == "length"
    await until(stack.is_idle, "an empty queue")
    assert impatient.stop() == 0
    figure(f"{endings.count('cancelled')} of 35 were cancelled, the one with another listener was told to its end")


async def test_without_any_storyteller_stories_end_when_their_time_is_over(stack: House, figure: Figure) -> None:
    async def ending(socket: ClientConnection) -> wire.Done:
        while not isinstance(frame := await receive(socket), wire.Done):
            pass
        return frame

    async with player(stack.urls[0], "begun") as begun, player(stack.urls[1], "waits") as waits:
        await begun.send(wire.encode(ask(2, tokens=1000)))
        while not isinstance(frame := await receive(begun), wire.Text):
            pass
        for teller in stack.storytellers:
            teller.signal(signal.SIGSTOP)
        await waits.send(wire.encode(ask(2)))
        queued = await receive(waits)
        assert isinstance(queued, wire.Queued)
        with stack.redis as redis:
            # As if they had waited for longer than STORYTELLER_DEADLINE_S.
            redis.hincrby(Key.STORY + queued.story, "accepted", -41_000)
            started = time.monotonic()
            assert (await ending(waits)).finish_reason == "expired"
            expired_after = time.monotonic() - started
            await until(lambda: redis.zscore(Key.WAITING, frame.story), "the begun story in the queue", 15)
            redis.hincrby(Key.STORY + frame.story, "put_back", -41_000)
            assert (await ending(begun)).finish_reason == "failed"
        failed_after = time.monotonic() - started
    for teller in stack.storytellers:
        teller.signal(signal.SIGCONT)
    await until(stack.is_idle, "an empty queue")
    assert failed_after < 20
    figure(f"expired after {expired_after:.1f} s, failed after {failed_after:.1f} s, the waiting itself not counted")
