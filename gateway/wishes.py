"""What somebody asks for, in the one shape that both doors bring it into, and what a refusal looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gateway.wire import ErrorCode
from storyteller import wire

MOST = 2**31 - 1
"""More tokens than any window has, and more than any vocabulary: a larger number means the same."""


class RefusedError(Exception):
    """This cannot be; `code` and `message` are for the client."""

    def __init__(self, code: ErrorCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Wish:
    """One story, as it should be told."""

    prompt: wire.Prompt
    settings: wire.Settings = field(default_factory=wire.Settings)
    voice: str | None = None
    player: str | None = None
    seed: int | None = None
    priority: wire.Priority = "normal"


class Drawn(Protocol):
    """The settings that both doors take by the same names, checked when they were read."""

    @property
    def max_tokens(self) -> int | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...
    @property
    def stop(self) -> str | list[str] | None: ...
    @property
    def ignore_end(self) -> bool: ...


def settings_of(asked: Drawn) -> wire.Settings:
    """How the story is to be drawn. Numbers without an upper bound are cut to what travels over the wire."""
    return wire.Settings(
        max_tokens=None if asked.max_tokens is None else min(asked.max_tokens, MOST),
        temperature=asked.temperature,
        top_k=None if asked.top_k is None else min(asked.top_k, MOST),
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        ignore_end=asked.ignore_end,
    )
