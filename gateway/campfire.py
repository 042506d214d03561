"""One story at one gateway, and all who listen to it here.

However many listen, the story is read from Redis once. What was told so far stands in `text`; each listener keeps its
own place in it, so one that is slow costs nothing but its own delay, and no queue grows.
"""

from __future__ import annotations

import asyncio
import time

from gateway import metrics
from storyteller import wire


class Campfire:
    """A story as told so far. `is_ours`: this gateway accepted the ask, and counts it."""

    def __init__(self, story: str, *, is_ours: bool) -> None:
        self.story = story
        self.is_ours = is_ours
        self.text = ""
        self.ending: wire.Ending | None = None
        self.position = -1  # asks before it in the queue; -1: it is being written
        self.last_id: bytes | str = "0-0"  # of the last entry read from its stream
        self.num_listeners = 0
        self.was_heard = not is_ours  # the first listener came; an ended story waits for that
        self.is_known = not is_ours  # Redis has it, unless its data is lost; false until the ask is accepted
        self.ended_at = 0.0
        self.changed = asyncio.Event()  # replaced at every change: wait for the one at hand, then look again
        self._accepted_at = self._told_at = time.monotonic()
        self._eta_s = 0.0  # when it was promised to begin
        self._has_begun = False

    @property
    def is_needed(self) -> bool:
        """Whether it must still be read: somebody listens, or its ending must be counted."""
        return self.ending is None and (self.num_listeners > 0 or self.is_ours)

    def promise(self, position: int, eta_s: float) -> None:
        """What its player was told when the ask was accepted."""
        self.is_known = True
        self._eta_s = eta_s
        if not self._has_begun:
            self.position = position

    def take_in(self, entry_id: bytes, entry: wire.Told | wire.Begun | wire.Ending) -> None:
        """One more entry of the story's stream."""
        self.last_id = entry_id
        match entry:
            case wire.Told(offset, text):
                self._take_text(offset, text)
            case wire.Begun("begun"):
                self._begin()
            case wire.Ending():
                self.end(entry)

    def end(self, ending: wire.Ending) -> None:
        if self.ending is not None:
            return
        self.ending, self.ended_at = ending, time.monotonic()
        if self.is_ours:
            metrics.stories.labels(ending.finish_reason).inc()
            metrics.story_seconds.observe(time.monotonic() - self._accepted_at)
        self.notify()

    def fail(self, message: str) -> None:
        """An ending that Redis does not have: it lost the story."""
        self.end(wire.Ending("failed", 0, 0, message=message))

    def move(self, position: int) -> None:
        """Its place in the queue has changed."""
        if position != self.position and not self._has_begun:
            self.position = position
            self.notify()

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _take_text(self, offset: int, text: str) -> None:
        # After Redis lost its last second, another attempt tells again what is out already; characters never change.
        known = len(self.text) - offset
        if known < 0:
            self.fail(f"text is missing: expected it from character {len(self.text)} on, got it from {offset}")
            return
        if known >= len(text):
            return
        if self.is_ours:
            now = time.monotonic()
            observed = metrics.text_gap if self.text else metrics.first_text
            observed.observe(now - (self._told_at if self.text else self._accepted_at))
            self._told_at = now
        self.text += text[known:]
        self.notify()

    def _begin(self) -> None:
        if not self._has_begun and self.is_ours:
            metrics.eta_error.observe(abs(time.monotonic() - self._accepted_at - self._eta_s))
        self._has_begun = True
        self.position = -1
