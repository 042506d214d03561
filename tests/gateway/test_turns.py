"""Whose turn it is: limits over two gateways, a full queue, two lanes, fairness, and places that always come free.

The storyteller tells one story at a time.
"""

from __future__ import annotations

import asyncio
import time

from redis import Redis

from tests.gateway.client import FOR_EVER, Client, player
from tests.processes import Gateway, Stack, Storyteller, metric, wait_until


async def end(client: Client, *ids: str) -> None:
    for frame_id in ids:
        await client.say({"type": "cancel", "id": frame_id})
        await client.until("done", frame_id)


async def test_a_players_limit_holds_over_two_gateways_and_doors(gateway: Gateway, second_gateway: Gateway) -> None:
    async with player(gateway.url, "alice") as here, player(second_gateway.url, "alice") as there:
        assert (await here.ask("a", **FOR_EVER))["type"] == "queued"
        assert (await there.ask("b", max_tokens=1))["type"] == "queued"
        for client in (here, there):
            refused = await client.ask("c")
            assert (refused["code"], refused["temporary"]) == ("rate_limited", True)
            assert refused["retry_after_ms"] > 0
        async with player(gateway.url, "bob") as other:
            assert (await other.ask("a", max_tokens=1))["type"] == "queued"
            await end(other, "a")
        await end(here, "a")
        await there.until("done", "b")
        assert (await there.ask("d", max_tokens=1))["type"] == "queued"
        await there.until("done", "d")


async def test_a_full_queue_says_when_to_come_again(gateway: Gateway, second_gateway: Gateway) -> None:
    """The second gateway lets two wait."""
    async with player(gateway.url) as first, player(second_gateway.url) as second, player(second_gateway.url) as third:
        story = {"max_tokens": 2000, "ignore_end": True}
        await first.begin("a", **FOR_EVER)
        places = [await second.ask(frame_id, **story) for frame_id in "bc"]
        assert [place["position"] for place in places] == [0, 1]
        assert places[0]["eta_ms"] <= places[1]["eta_ms"]
        refused = await third.ask("d", **story)
        assert (refused["code"], refused["temporary"]) == ("busy", True)
        assert 0 < refused["retry_after_ms"] < 60_000
        await end(first, "a")
        until = time.monotonic() + 60
        while (await third.ask("d", **story))["type"] == "error":
            assert time.monotonic() < until
        for client, frame_id in ((second, "b"), (second, "c"), (third, "d")):
            await client.until("done", frame_id)


async def test_the_high_lane_goes_first_and_places_are_told_anew(gateway: Gateway) -> None:
    async with player(gateway.url) as first, player(gateway.url) as normal, player(gateway.url) as high:
        await first.begin("a", **FOR_EVER)
        assert (await normal.ask("n", max_tokens=1))["position"] == 0
        assert (await high.ask("h", priority="high", max_tokens=1))["position"] == 0
        assert (await normal.until("queued", "n"))["position"] == 1
        await end(first, "a")
        high_done, normal_done = await asyncio.gather(high.until("done", "h"), normal.until("done", "n"))
        assert high_done["timing"]["queue_ms"] < normal_done["timing"]["queue_ms"]


class Greedy:
    """Has two unfinished asks at every moment, and asks again as soon as one has ended."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.has_ended = asyncio.Condition()
        self.is_over = False

    async def play(self, url: str) -> None:
        async with player(url, "greedy") as client:
            story = {"max_tokens": 3000, "ignore_end": True}
            for number in range(2):
                await client.ask(f"g{number}", **story)
            while not self.is_over:
                await client.until("done")
                async with self.has_ended:
                    self.num_ended += 1
                    self.has_ended.notify_all()
                await client.say({"type": "ask", "id": f"g{self.num_ended + 1}", "words": ["gold"], **story})


async def test_a_player_who_asks_without_end_delays_others_by_one_story_at_most(gateway: Gateway) -> None:
    greedy = Greedy()
    async with asyncio.TaskGroup() as players, player(gateway.url, "patient") as client:
        players.create_task(greedy.play(gateway.url))
        for number in range(6):
            async with greedy.has_ended:
                await greedy.has_ended.wait()  # so that one of its stories has just begun
            before = greedy.num_ended
            await client.ask(f"p{number}", max_tokens=8, ignore_end=True)
            done = await client.until("done", f"p{number}")
            assert done["finish_reason"] == "length"
            assert greedy.num_ended - before <= 1
        greedy.is_over = True


async def test_a_players_place_comes_free_even_after_the_storyteller_was_killed(
    running: Stack, storyteller: Storyteller, gateway: Gateway
) -> None:
    """The last test of this stack: its storyteller ends here, another one goes on."""
    async with player(gateway.url, "carol") as client:
        for frame_id in "ab":
            assert (await client.ask(frame_id, max_tokens=4000, ignore_end=True))["type"] == "queued"
        await client.until("text", "a")
        storyteller.kill()
        assert (await client.ask("c"))["code"] == "rate_limited"
        await asyncio.to_thread(running.storyteller, STORYTELLER_MAX_TOKENS="4000", STORYTELLER_THREADS="1")
        ended = {(await client.until("done"))["id"] for _ in "ab"}
        assert ended == {"a", "b"}
        assert (await client.ask("d", max_tokens=1))["type"] == "queued"
        await client.until("done", "d")
    redis = Redis.from_url(running.valkey.url)
    assert redis.keys("player:*") == []
    assert redis.zcard("waiting") == 0
    assert redis.xlen("asks") == 0
    redis.close()
    await asyncio.to_thread(
        wait_until, lambda: metric(gateway.metrics(), "gateway_listeners") == 0, "an honest count", 10
    )
    assert "Traceback" not in gateway.text()
