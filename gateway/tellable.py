"""Whether a wish can be told at all, before it is accepted: its voice, its length, the order of its roles.

The gateway has no tokenizer. A bound by bytes is enough for almost every wish; for the rest a storyteller is asked how
many tokens the prompt has. Where no storyteller was ever seen there is nothing to check against, and where none answers
in time the wish is accepted: its storyteller will end it as failed if it must.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.houses import Houses
from gateway.wishes import RefusedError, Wish
from storyteller import wire

BYTES_PER_TOKEN = 32
"""No text has so many: a prompt that is longer than that is too long without being measured."""
MAX_KNOWN_ROLES = 1000


class Tellable:
    """Checks wishes against what the storytellers said of themselves.

    `measure` asks a storyteller for the tokens of a prompt: -1 where its template or vocabulary does not take it,
    `None` where nobody answers.
    """

    def __init__(self, houses: Houses, measure: Callable[[Wish], Awaitable[int | None]]) -> None:
        self._houses = houses
        self._measure = measure
        self._known_roles: set[tuple[str, ...]] = {()}  # orders of roles that the model's template takes

    async def check(self, wish: Wish) -> None:
        """Refuses what no storyteller could tell. Where none was ever seen, there is nothing to check against."""
        house = self._houses.house
        if house is None:
            return
        if wish.voice is not None and wish.voice not in house.voices:
            raise RefusedError("bad_request", f"voice: expected one of {', '.join(house.voices)}, got {wish.voice!r}")
        most = min(house.window, house.kv_tokens + 1) - 1  # tokens of a prompt that leaves room for one
        longest = _most_tokens(wish.prompt)
        if longest > (most + 1) * BYTES_PER_TOKEN:
            raise RefusedError("too_long", f"prompt: expected at most {most} tokens, got {longest} bytes")
        roles = _unusual(wish.prompt)
        if longest + house.overhead <= most and roles in self._known_roles:
            return
        num_tokens = await self._measure(wish)
        if num_tokens is not None and num_tokens > most:
            raise RefusedError("too_long", f"prompt: expected at most {most} tokens, got {num_tokens}")
        if num_tokens == -1:
            raise RefusedError("bad_request", "prompt: the model's template or vocabulary does not take it")
        if num_tokens is not None and any(roles) and len(roles) <= 64 and len(self._known_roles) < MAX_KNOWN_ROLES:
            self._known_roles.add(roles)


def _most_tokens(prompt: wire.Prompt) -> int:
    """A bound: no vocabulary makes more tokens than there are bytes."""
    match prompt:
        case wire.Words(words):
            return len(", ".join(words).encode())
        case wire.Text(text) | wire.Raw(text):
            return len(text.encode()) + 1
        case wire.Chat(messages):
            return sum(len(message.content.encode()) + len(message.role) + 8 for message in messages)


def _unusual(prompt: wire.Prompt) -> tuple[str, ...]:
    """What a model may refuse for another reason than its length: an order of roles, or nothing at all."""
    match prompt:
        case wire.Chat(messages):
            return tuple(message.role for message in messages)
        case wire.Raw(""):
            return ("",)
        case _:
            return ()
