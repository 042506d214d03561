"""A cancellation that a library swallows ends a service all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.player import _end
from gateway.stories import Stories
from storyteller.config import Config
from storyteller.teller import Teller

NOBODY: Any = None


class Deaf:
    """A wait that swallows the first cancellation and works on, as `asyncio.wait_for` of Python 3.11 may."""

    def __init__(self) -> None:
        self.num_waits = 0

    async def wait(self) -> None:
        self.num_waits += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if self.num_waits > 1:
                raise


@pytest.mark.parametrize("service", ["gateway", "storyteller"])
async def test_a_loop_ends_though_its_cancellation_was_swallowed(service: str) -> None:
    async with Redis() as redis:
        loops = {
            "gateway": lambda step: Stories(redis, redis, queue_limit=1, player_limit=1, grace_s=1)._repeat(step),
            "storyteller": lambda step: Teller(Config(), NOBODY, NOBODY, NOBODY)._repeat(step, 0.0),
        }
        deaf = Deaf()
        task = asyncio.create_task(loops[service](deaf.wait))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,), timeout=10)
        assert task.done()
        assert deaf.num_waits == 1


async def test_a_players_tasks_are_cancelled_until_they_end() -> None:
    deaf = Deaf()

    async def listen() -> None:
        while True:
            await deaf.wait()

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    await asyncio.wait_for(_end(task), 10)
    assert task.cancelled()
    assert deaf.num_waits == 2
