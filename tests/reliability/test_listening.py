"""A campfire: anyone may listen, from any place of a story, at any gateway, while it is told and afterwards."""

from __future__ import annotations

import asyncio

import pytest

from gateway import wire
from storyteller import wire as story_wire
from storyteller.wire import RETENTION_S, Key
from tests.processes import metric, wait_until
from tests.reliability.crowd import ask, player, receive, replay
from tests.reliability.house import House
from tests.reliability.test_faults import until


async def hear(url: str, story: str, after: str | None = None) -> tuple[str, wire.Done]:
    """A story behind a cursor, to its ending."""
    async with player(url, "listener") as socket:
        await socket.send(wire.encode(wire.Listen("l", story, after)))
        text, cursors = "", set()
        while not isinstance(frame := await receive(socket), wire.Done):
            assert isinstance(frame, wire.Text), frame
            assert frame.cursor not in cursors
            cursors.add(frame.cursor)
            text += frame.text
        return text, frame


async def test_whoever_comes_hears_the_whole_story_or_goes_on_behind_the_cursor(
    small_stack: House, truth: dict[int, str]
) -> None:
    here, there = small_stack.urls
    hearings: dict[str, tuple[int, asyncio.Task[tuple[str, wire.Done]]]] = {}

    def listen(name: str, url: str, after: str | None = None, offset: int = 0) -> None:
        hearings[name] = (offset, asyncio.create_task(hear(url, story, after)))

    async with player(here, "asker") as socket:
        await socket.send(wire.encode(ask(3)))
        queued = await receive(socket)
        assert isinstance(queued, wire.Queued)
        story, text, frames = queued.story, "", 0
        listen("before the first word, here", here)
        listen("before the first word, there", there)
        while not isinstance(frame := await receive(socket), wire.Done):
            if isinstance(frame, wire.Text):
                text, frames = text + frame.text, frames + 1
                # At once, at a gateway that may not have read so far yet: never refused.
                listen(f"behind frame {frames}, there", there, frame.cursor, len(text))
                if frames == 3:
                    listen("from the beginning, in the middle of it, there", there)
                    with small_stack.redis as redis:
                        assert redis.info("clients")["blocked_clients"] <= 5, "more than one reader a process"
    assert text == truth[3]
    listen("afterwards, there", there)
    listen("behind the last word, here", here, frame.cursor, len(text))
    assert len(hearings) > 10
    for name, (offset, hearing) in hearings.items():
        heard, done = await hearing
        assert heard == text[offset:], name
        assert (done.finish_reason, done.cursor, done.usage) == (frame.finish_reason, frame.cursor, frame.usage), name
    with small_stack.redis as redis:
        assert RETENTION_S - 60 < redis.ttl(Key.TOLD + story) <= RETENTION_S
        assert RETENTION_S - 60 < redis.ttl(Key.STORY + story) <= RETENTION_S
    pages = [gateway.metrics for gateway in small_stack.gateways]
    await until(lambda: not any(metric(page(), "gateway_listeners") for page in pages), "no listener")


async def test_a_listener_that_leaves_takes_nothing_from_the_others(small_stack: House, truth: dict[int, str]) -> None:
    async with player(small_stack.urls[0], "asker") as socket, player(small_stack.urls[1], "guest") as guest:
        await socket.send(wire.encode(ask(4)))
        queued = await receive(socket)
        assert isinstance(queued, wire.Queued)
        await guest.send(wire.encode(wire.Listen("l", queued.story)))
        assert isinstance(await receive(guest), wire.Text)
        await guest.send(wire.encode(wire.Cancel("l")))
        while isinstance(last := await receive(guest), wire.Text):
            pass
        assert last == wire.Left("l", queued.story)
        text = ""
        while not isinstance(frame := await receive(socket), wire.Done):
            text += frame.text if isinstance(frame, wire.Text) else ""
    assert (text, frame.finish_reason) == (truth[4], "length")


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "being told"])
async def test_what_is_no_place_in_a_story_is_refused_and_never_hangs(small_stack: House, is_told: bool) -> None:
    async with player(small_stack.urls[0], "asker") as socket, player(small_stack.urls[1], "guest") as guest:
        await socket.send(wire.encode(ask(5, tokens=1000)))
        queued = await receive(socket)
        assert isinstance(queued, wire.Queued)
        story = queued.story
        while is_told and not isinstance(await receive(socket), wire.Done):
            pass
        wrong = {
            "malformed": (story, "1-2"),
            "empty": (story, ""),
            "negative": (story, "-1.00000000"),
            "of another story": (story, story_wire.cursor("another", 0)),
            "from the future": (story, story_wire.cursor(story, 1_000_000)),
            "a story that is none": ("nowhere", None),
            "a story that is none, with its cursor": ("nowhere", story_wire.cursor("nowhere", 0)),
            "a key of Redis": ("*", None),
            "an id that is too long": ("x" * 65, None),
        }
        for name, (where, after) in wrong.items():
            await guest.send(wire.encode(wire.Listen(name[:64], where, after)))
            error = await asyncio.wait_for(receive(guest), 5)
            assert isinstance(error, wire.Error), (name, error)
            assert error.id == name
            assert error.code == ("not_found" if name.startswith(("a story", "a key")) else "bad_request"), (
                name,
                error,
            )
        await guest.send(wire.encode(wire.Listen("right", story)))
        assert isinstance(await receive(guest), wire.Text), "the connection lives on"


async def test_a_story_whose_time_is_over_is_not_found(small_stack: House) -> None:
    async with player(small_stack.urls[0], "asker") as socket:
        await socket.send(wire.encode(ask(6, tokens=5)))
        while not isinstance(done := await receive(socket), wire.Done):
            pass
    with small_stack.redis as redis:
        redis.pexpire(Key.STORY + done.story, 1)
        redis.pexpire(Key.TOLD + done.story, 1)
        await asyncio.to_thread(wait_until, lambda: not redis.exists(Key.STORY + done.story), "the story, expired")
    for url in small_stack.urls:
        with pytest.raises(AssertionError, match="not_found"):
            await replay(url, done.story)
