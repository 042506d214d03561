"""From the storyteller to Redis: text and endings, all stories of a flush in one round trip.

Every telling has its story's open attempt and a number of its own, so a repeated call changes nothing and a call of an
attempt that is over is refused, whoever makes it and however late. Errors of the connection are the caller's: the same
tellings are simply sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from storyteller import wire

Answer = Literal["told", "refused", "gone"]


@dataclass(frozen=True, slots=True)
class Telling:
    """One entry for a story's stream."""

    story: str
    attempt: int
    number: int  # counts this attempt's tellings from 1
    prompt_tokens: int
    content: wire.Told | wire.Ending


class Outbox:
    def __init__(self, redis: Redis) -> None:
        self._tell = redis.register_script(wire.script("tell"))

    async def tell(self, tellings: Sequence[Telling]) -> list[Answer]:
        """Sends them all, in order; one answer for each. Raises `redis.RedisError`: then send them again."""
        args: list[bytes | str | int] = []
        for telling in tellings:
            content = telling.content
            reason = content.finish_reason if isinstance(content, wire.Ending) else ""
            fields = [value for field in content.fields().items() for value in field]
            args += [
                telling.story,
                telling.attempt,
                telling.number,
                reason,
                telling.prompt_tokens,
                len(fields),
            ]
            args += fields
        return [answer.decode() for answer in await self._tell(args=args)]
