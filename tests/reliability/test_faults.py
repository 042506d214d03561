"""Kill anything under a crowd: every story is the one that an undisturbed run tells, whole, once, with one ending."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from gateway import wire
from storyteller.wire import LEASE_S, Key
from tests.processes import wait_until
from tests.reliability.conftest import SEEDS
from tests.reliability.crowd import Crowd, Heard, ask, check, player, receive, replay
from tests.reliability.house import House

Figure = Callable[[str], None]
RECLAIM_S = 15


async def until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    await asyncio.to_thread(wait_until, condition, what, timeout_s)


def attempts_of(stack: House, crowd: Crowd) -> list[int]:
    with stack.redis as redis:
        return [int(redis.hget(Key.STORY + heard.story, "attempt")) for heard in crowd.heard]


async def test_a_storyteller_is_killed(stack: House, truth: dict[int, str], figure: Figure) -> None:
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        holdings = stack.holdings()
        stack.storytellers[holdings.index(max(holdings))].kill()
    await check(crowd, truth)
    assert max(attempts_of(stack, crowd)) > 1, "nobody had to go on with a story"
    assert crowd.longest_silence_s < RECLAIM_S
    assert stack.is_idle()
    figure(f"{max(holdings)} stories went on elsewhere; longest silence {crowd.longest_silence_s:.1f} s")


async def test_storytellers_sleep_past_their_lease_and_wake_one_after_the_other(
    stack: House, truth: dict[int, str], figure: Figure
) -> None:
    """Each finds stories that it believes to hold in the queue, and in the other's hands."""
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        held = stack.holdings()
        for sleeper in stack.storytellers:
            sleeper.signal(signal.SIGSTOP)
        slept = time.monotonic()
        await until(lambda: sum(stack.holdings()) == 0, "all stories back in the queue", RECLAIM_S)
        took = time.monotonic() - slept
        stack.storytellers[0].signal(signal.SIGCONT)
        await until(lambda: stack.holdings()[0] > 0, "the first one, at work")
        stack.storytellers[1].signal(signal.SIGCONT)
    await check(crowd, truth)
    assert min(held) > 0
    await until(lambda: all(teller.is_ready() for teller in stack.storytellers), "both, awake")
    assert stack.is_idle()
    figure(
        f"{sum(held)} stories put back after {took:.1f} s, told on by whoever woke; "
        f"longest silence {crowd.longest_silence_s:.1f} s"
    )


async def test_a_gateway_is_killed(stack: House, truth: dict[int, str], figure: Figure) -> None:
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        stack.gateways[0].kill()
    crowd.urls = [stack.gateways[1].url]
    await check(crowd, truth)
    assert crowd.num_resumes > 0
    assert max(attempts_of(stack, crowd)) == 1, "no story was disturbed"
    figure(f"{crowd.num_resumes} resumed elsewhere; longest silence {crowd.longest_silence_s:.1f} s")


async def test_redis_is_killed_and_restarted_with_its_log(stack: House, truth: dict[int, str], figure: Figure) -> None:
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        stack.stack.valkey.kill()
        await asyncio.to_thread(stack.start_redis)
    await check(crowd, truth)
    figure(f"longest silence {crowd.longest_silence_s:.1f} s")


async def test_redis_is_gone_for_five_seconds(stack: House, truth: dict[int, str], figure: Figure) -> None:
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        assert stack.stack.valkey.stop() == 0
        gone = time.monotonic()
        await until(lambda: time.monotonic() - gone >= 5, "five seconds")
        await asyncio.to_thread(stack.start_redis)
    await check(crowd, truth)
    assert max(attempts_of(stack, crowd)) == 1, "a storyteller that lives lost its stories"
    figure(f"no story changed hands; longest silence {crowd.longest_silence_s:.1f} s")


async def test_redis_hangs_for_longer_than_a_lease_and_nobody_is_blamed(
    stack: House, truth: dict[int, str], figure: Figure
) -> None:
    crowd = Crowd(stack.urls, SEEDS)
    async with crowd.playing():
        await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
        stack.stack.valkey.signal(signal.SIGSTOP)
        hung = time.monotonic()
        await until(lambda: time.monotonic() - hung >= LEASE_S + 1, "more than a lease")
        stack.stack.valkey.signal(signal.SIGCONT)
    await check(crowd, truth)
    with stack.redis as redis:
        crashes = [int(redis.hget(Key.STORY + heard.story, "crashes")) for heard in crowd.heard]
    assert max(crashes) == 0
    figure(f"longest silence {crowd.longest_silence_s:.1f} s")


async def test_redis_loses_all_its_data(stack: House, truth: dict[int, str], figure: Figure) -> None:
    async def hear(url: str, heard: Heard) -> None:
        async with player(url, f"player-{heard.seed}") as socket:
            await socket.send(wire.encode(ask(heard.seed)))
            while not heard.done:
                frame = await receive(socket)
                if isinstance(frame, wire.Text):
                    heard.frames.append(frame)
                elif isinstance(frame, wire.Done):
                    heard.done.append(frame)

    everybody = [Heard(seed) for seed in SEEDS]
    with stack.redis as redis:
        async with asyncio.TaskGroup() as players:
            for number, heard in enumerate(everybody):
                players.create_task(hear(stack.urls[number % 2], heard))
            await until(lambda: sum(len(heard.frames) >= 3 for heard in everybody) >= 8, "stories under way")
            before = redis.info("stats")
            flushed = time.monotonic()
            redis.flushall()
        took = time.monotonic() - flushed
        next_one = Heard(0)
        await hear(stack.urls[0], next_one)
        after, seconds = redis.info("stats"), time.monotonic() - flushed
    failed = [heard for heard in everybody if heard.done[0].finish_reason == "failed"]
    assert len(failed) >= 8
    for heard in everybody:
        assert truth[heard.seed].startswith(heard.text)
        assert heard in failed or heard.text == truth[heard.seed]
    assert took < 15
    assert next_one.text == truth[0]
    num_errors = after["total_error_replies"] - before["total_error_replies"]
    num_commands = after["total_commands_processed"] - before["total_commands_processed"]
    assert num_errors <= 20
    assert num_commands / seconds < 3000  # scripts count with each of their calls
    assert stack.is_idle()
    figure(
        f"{len(failed)} endings as failed within {took:.1f} s; the next ask was told after {seconds - took:.1f} s; "
        f"{num_errors} error replies, {num_commands / seconds:.0f} commands/s"
    )


async def test_answers_of_redis_are_lost_on_the_way(stack: House, truth: dict[int, str], figure: Figure) -> None:
    with stack.redis as redis:
        redis.flushall()
        await until(lambda: redis.zcard(Key.LIVE) == 2, "storytellers that beat")
        lost = stack.proxy.num_lost
        stack.proxy.loss = 0.25
        crowd = Crowd(stack.urls, SEEDS)
        async with crowd.playing():
            pass
        stack.proxy.loss = 0.0
        await check(crowd, truth)
        await until(stack.is_idle, "an end of what nobody waits for", 10)
        stories = [key.decode().removeprefix(Key.STORY) for key in redis.keys(Key.STORY + "*")]
        told = [(redis.hget(Key.STORY + story, "seed"), await replay(stack.urls[0], story)) for story in stories]
    whole = sorted(int(seed) for seed, (_, done) in told if done.finish_reason == "length")
    assert whole == sorted(SEEDS), "an ask was told twice"
    assert all(done.finish_reason in ("length", "cancelled") for _, (_, done) in told)
    figure(
        f"{stack.proxy.num_lost - lost} answers lost; {len(told) - len(whole)} asks that could not be confirmed were "
        f"cancelled; attempts at a story: at most {max(attempts_of(stack, crowd))}"
    )


async def test_an_ask_kills_its_storyteller_three_times(stack: House, truth: dict[int, str], figure: Figure) -> None:
    """The poison: a supervisor kills whoever has begun it, and starts another storyteller in its place."""
    crowd = Crowd(stack.urls, SEEDS)
    deaths = 0

    def kill_the_holder(story: str) -> bool:
        holder = stack.holder_of(story)
        if holder is None:
            return False
        holder.kill()
        stack.storytellers[stack.storytellers.index(holder)] = stack.storyteller()
        return True

    async with player(stack.urls[0], "poisoner") as socket:
        await socket.send(wire.encode(ask(999)))
        queued = await receive(socket)
        assert isinstance(queued, wire.Queued)
        async with crowd.playing():
            for _ in range(3):
                await until(lambda: kill_the_holder(queued.story), "the poison, begun", 60)
                deaths += 1
            started = time.monotonic()
            while not isinstance(done := await receive(socket), wire.Done):
                pass
            took = time.monotonic() - started
    assert (done.finish_reason, deaths) == ("failed", 3)
    assert done.message is not None
    assert "died 3 times" in done.message
    await check(crowd, truth)
    with stack.redis as redis:
        letters = [fields[b"story"].decode() for _, fields in redis.xrange(Key.DEAD)]
    assert letters == [queued.story]
    figure(f"failed {took:.1f} s after the third death; all {len(crowd.heard)} others whole")
