"""What came of one ask: the record that bots hand in, and the checks made on frames as they come.

`Told` is small and travels between processes. `Telling` is a story while it is heard: it keeps the frames, so that
the replay can be compared with them afterwards (`loadbots.replay`). Times are seconds of the machine's monotonic
clock, the same in every process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from typing import Literal

import msgspec

from gateway.wire import Done, Queued
from loadbots.asks import Wish

Phase = Literal["warmup", "measured", "check"]
GOOD_ENDINGS = ("stop", "length")
REPLACEMENT = "\ufffd"


class Told(msgspec.Struct, tag=True):
    """One ask, from the moment when it was meant to be made to its ending."""

    player: int
    number: int
    phase: Phase
    intended: float
    begun: float | None = None
    """When the player set about it; what is between is the bots' own lag."""
    sent: float | None = None
    first_text: float | None = None
    gaps: list[float] = []
    ended: float | None = None
    ending: str | None = None
    """The finish reason; None where there was no ending."""
    given_up: str | None = None
    """The error code after which the player gave up."""
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    """Everything that went wrong by code, refusals that were tried again too."""
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    """The gateway's answers to asks that were not accepted, by code."""
    accepted: int = 0
    unanswered: int = 0
    """Asks whose connection broke before an answer: accepted or not, nobody can tell."""
    tokens: int = 0
    prompt_tokens: int = 0
    frames: int = 0
    repeated: int = 0
    resumes: int = 0
    stalled: bool = False
    cancelled: bool = False
    """The player cancelled it."""
    hung_up: bool = False
    """It cancelled by hanging up: how the story ended nobody tells."""
    faults: list[str] = []
    """Broken promises, in words."""
    digest: str = ""
    """Of the whole text."""

    @property
    def good(self) -> bool:
        return self.ending in GOOD_ENDINGS

    def fail(self, code: str) -> None:
        self.errors[code] += 1
        self.given_up = code


class Amendment(msgspec.Struct, tag=True):
    """What turned out about a story after its record was handed in."""

    player: int
    number: int
    lost: int = 0
    repeated: int = 0
    verified: bool = False
    faults: list[str] = []


class Strain(msgspec.Struct, tag=True):
    """How hard a bots' process itself worked in the measured time: its event loop's lateness, its processor time."""

    late: list[float]
    cpu_s: float


Word = Told | Amendment | Strain
"""What a squad hands to its sink."""


class Telling:
    """A story while it is heard."""

    def __init__(self, wish: Wish, told: Told, max_tokens: int) -> None:
        self.wish = wish
        self.told = told
        self.max_tokens = max_tokens
        self.story: str | None = None  # the gateway's name of it, from `queued` on
        self.cursors: list[str] = []  # one a text frame, in the order of arrival
        self.texts: list[str] = []  # the same frames' texts
        self._seen: set[str] = set()  # the same cursors
        self._last: float | None = None  # when the last text came; None: the next gap is not the server's

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def queue(self, frame: Queued) -> None:
        """The ask was accepted, or its place in the queue changed."""
        if self.story is None:
            self.story = frame.story
            self.told.accepted += 1
        elif self.story != frame.story:
            self.told.faults.append("queued came with another story")

    def hear(self, cursor: str, text: str, now: float) -> None:
        """One text frame."""
        told = self.told
        if cursor in self._seen:
            told.repeated += 1
            told.faults.append("a text frame came twice")
            return
        if not cursor or not text:
            told.faults.append("a text frame without a cursor or without text")
        self._seen.add(cursor)
        self.cursors.append(cursor)
        self.texts.append(text)
        told.frames += 1
        if told.first_text is None:
            told.first_text = now
        elif self._last is not None and not told.stalled:
            told.gaps.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """The socket was lost or not read: the pause until the next text is not a gap of the server's making."""
        self._last = None

    def finish(self, frame: Done, now: float, *, exact: bool) -> None:
        """The game protocol's ending."""
        told, usage = self.told, frame.usage
        if self.story is None:
            told.accepted += 1
            told.faults.append("done came before queued")
        self.end(frame.finish_reason, usage.completion_tokens, usage.prompt_tokens, now, exact=exact)
        if frame.finish_reason in ("expired", "failed"):
            told.errors[frame.finish_reason] += 1
        if frame.seed != self.wish.seed:
            told.faults.append("done tells another seed than was asked for")

    def end(self, ending: str, tokens: int, prompt_tokens: int, now: float, *, exact: bool) -> None:
        """The ending. `exact`: the ask forbade an end before `max_tokens`."""
        told = self.told
        told.ended, told.ending = now, ending
        told.tokens, told.prompt_tokens = tokens, prompt_tokens
        told.digest = hashlib.blake2b(self.text.encode(errors="replace"), digest_size=12).hexdigest()
        told.faults += usage_faults(tokens, told.frames, self.max_tokens)
        if exact and ending == "stop":
            told.faults.append("ended with stop though the end was to be ignored")
        if cut_character(self.texts):
            told.faults.append("a character was cut in two between frames")
        self._seen.clear()


def usage_faults(tokens: int, frames: int, max_tokens: int) -> list[str]:
    """Where the counted tokens cannot be true. A token gives one frame at most; an opening and a flush one more."""
    if tokens > max_tokens:
        return [f"usage: expected {max_tokens} tokens at most, got {tokens}"]
    if frames > tokens + 2:
        return [f"usage: {frames} text frames came, but {tokens} tokens were counted"]
    if frames and not tokens:
        return ["usage: text came, but no token was counted"]
    return []


def cut_character(texts: list[str]) -> bool:
    """Whether characters were cut between frames: every replacement character of the story stands at the end of one
    frame or at the beginning of the next. A model may write broken bytes itself; then some stand elsewhere too."""
    at_cuts: set[int] = set()
    end = 0
    for left, right in pairwise(texts):
        end += len(left)
        if left.endswith(REPLACEMENT) and right.startswith(REPLACEMENT):
            leading = len(right) - len(right.lstrip(REPLACEMENT))
            at_cuts.update(range(end - 1, end + leading))
    return 0 < len(at_cuts) == sum(text.count(REPLACEMENT) for text in texts)
