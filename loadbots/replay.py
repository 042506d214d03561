"""What only a second hearing can tell: whether a story was heard whole, once each, in order.

Cursors are opaque, so the truth is the story as `listen` replays it from the beginning. A gateway may cut the replay
into other frames than it sent live: what counts is the text, and that a cursor known to both stands behind the same
text in both.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate

from gateway.wire import Done, Error, Listen, Text
from loadbots.connection import Connection, UnanswerableError
from loadbots.told import Amendment, Telling

REPLAY_S = 15.0
"""How long a replay of a finished story may take."""


async def replay(connection: Connection, request: str, story: str) -> tuple[list[Text], Done]:
    """A finished story from its beginning; frames of other requests are passed over."""
    texts: list[Text] = []
    async with asyncio.timeout(REPLAY_S):
        await connection.send(Listen(request, story))
        while True:
            frame = await connection.receive()
            if getattr(frame, "id", None) != request:
                continue
            if isinstance(frame, Text):
                texts.append(frame)
            elif isinstance(frame, Done):
                return texts, frame
            elif isinstance(frame, Error):
                raise UnanswerableError(frame.code)


def compare(telling: Telling, replayed: list[Text], done: Done) -> Amendment:
    """What the replay says about the story as it was heard."""
    wish, told = telling.wish, telling.told
    result = Amendment(wish.player, wish.number, verified=True)
    cursors = [frame.cursor for frame in replayed]
    if "".join(frame.text for frame in replayed) != telling.text:
        result.lost = len(set(cursors) - set(telling.cursors))
        result.faults.append("the text differs from the replay's")
    elif _places(cursors, [frame.text for frame in replayed], telling) is False:
        result.faults.append("cursors stand elsewhere in the replay")
    if len(set(cursors)) < len(cursors):
        result.faults.append("the replay has a cursor twice")
    if done.finish_reason != told.ending:
        result.faults.append(f"ended as {told.ending}, replayed as {done.finish_reason}")
    if done.usage.completion_tokens != told.tokens:
        result.faults.append(f"usage of {told.tokens} tokens, replayed as {done.usage.completion_tokens}")
    return result


def _places(cursors: list[str], texts: list[str], telling: Telling) -> bool:
    """Whether every cursor that both hearings know stands behind the same number of characters."""
    heard = dict(zip(telling.cursors, accumulate(map(len, telling.texts)), strict=True))
    again = dict(zip(cursors, accumulate(map(len, texts)), strict=True))
    return all(heard[cursor] == again[cursor] for cursor in heard.keys() & again.keys())
