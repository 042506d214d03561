"""SIGTERM: nothing is lost, nobody waits for a lease, and every service exits with 0."""

from __future__ import annotations

import asyncio
import time

from gateway import wire
from storyteller.wire import LEASE_S
from tests.processes import Process, fetch
from tests.reliability.conftest import SEEDS
from tests.reliability.crowd import Crowd, ask, check, player, receive
from tests.reliability.house import House
from tests.reliability.test_faults import Figure, attempts_of, until


async def test_a_rolling_restart_of_everything_loses_nothing_and_waits_for_no_lease(
    stack: House, truth: dict[int, str], figure: Figure
) -> None:
    crowds: list[Crowd] = []
    slowest, num_moved, num_resumed = 0.0, 0, 0

    async def stop_amid_a_crowd(process: Process) -> Crowd:
        nonlocal slowest
        crowd = Crowd(stack.urls, SEEDS)
        async with crowd.playing():
            await crowd.until(lambda: sum(len(heard.frames) >= 3 for heard in crowd.heard) >= 8)
            started = time.monotonic()
            assert await asyncio.to_thread(process.stop) == 0
            slowest = max(slowest, time.monotonic() - started)
        await asyncio.to_thread(stack.furnish)
        crowd.urls = stack.urls
        await check(crowd, truth)
        crowds.append(crowd)
        return crowd

    for teller in tuple(stack.storytellers):
        crowd = await stop_amid_a_crowd(teller)
        num_moved += sum(attempts > 1 for attempts in attempts_of(stack, crowd))
    for gateway in tuple(stack.gateways):
        num_resumed += (await stop_amid_a_crowd(gateway)).num_resumes
    longest_silence_s = max(crowd.longest_silence_s for crowd in crowds)
    assert num_moved > 0
    assert num_resumed > 0
    assert longest_silence_s < LEASE_S
    assert slowest < 30
    figure(
        f"{sum(len(crowd.heard) for crowd in crowds)} stories, {num_moved} changed their storyteller, {num_resumed} "
        f"resumed elsewhere; slowest exit {slowest:.1f} s, longest silence {longest_silence_s:.1f} s"
    )


async def test_the_last_storyteller_finishes_its_stories(stack: House, truth: dict[int, str], figure: Figure) -> None:
    for other in stack.storytellers[1:]:
        assert await asyncio.to_thread(other.stop) == 0
    crowd = Crowd(stack.urls, list(SEEDS)[:6])
    async with crowd.playing():
        await crowd.until_told()
        started = time.monotonic()
        assert await asyncio.to_thread(stack.storytellers[0].stop) == 0
    await check(crowd, truth)
    assert max(attempts_of(stack, crowd)) == 1
    figure(f"left after {time.monotonic() - started:.1f} s, all told")


async def test_a_gateway_lets_stories_end_takes_no_asks_and_closes_with_4000(
    small_stack: House, truth: dict[int, str], figure: Figure
) -> None:
    gateway = small_stack.gateways[0]
    async with player(gateway.url, "stays") as busy, player(gateway.url, "idles") as idle:
        await busy.send(wire.encode(ask(7)))
        while not isinstance(frame := await receive(busy), wire.Text):
            pass
        text = frame.text
        gateway.process.terminate()
        started = time.monotonic()
        while not isinstance(frame := await receive(busy), wire.Reconnect):
            text += frame.text if isinstance(frame, wire.Text) else ""
        assert 0 < frame.in_ms[0] < frame.in_ms[1]
        await until(lambda: fetch(f"{gateway.http}/readyz")[0] in (503, 0), "a gateway that is not ready")
        await busy.send(wire.encode(ask(8, "late")))
        is_refused = False
        while not isinstance(frame := await receive(busy), wire.Done):
            text += frame.text if isinstance(frame, wire.Text) else ""
            is_refused |= isinstance(frame, wire.Error) and (frame.id, frame.code) == ("late", "busy")
        assert (text, frame.finish_reason) == (truth[7], "length")
        assert is_refused
        for socket in (busy, idle):
            await asyncio.wait_for(socket.wait_closed(), 10)
            assert socket.close_code == wire.Close.DRAINING
    assert await asyncio.to_thread(gateway.process.wait, 30) == 0
    figure(f"left after {time.monotonic() - started:.1f} s")


async def test_a_storyteller_stops_in_time_though_redis_is_gone(small_stack: House, figure: Figure) -> None:
    teller = small_stack.storytellers[0]
    small_stack.stack.valkey.kill()
    await until(lambda: not teller.is_ready(), "a storyteller that misses Redis")
    started = time.monotonic()
    code = await asyncio.to_thread(teller.stop)
    gateway_code = await asyncio.to_thread(small_stack.gateways[0].stop)
    took = time.monotonic() - started
    await asyncio.to_thread(small_stack.start_redis)
    assert (code, gateway_code) == (0, 0)
    assert took < 30
    figure(f"both left after {took:.1f} s")
