"""What the live storytellers say of themselves, and what follows: readiness, limits, and honest waiting times."""

from __future__ import annotations

from collections.abc import Mapping

from storyteller import wire

UNKNOWN_STORY_S = 5.0
"""How long a story takes where no storyteller has ended one yet."""


class Houses:
    """All storytellers, by name; those that made progress within `wire.PRESENCE_S` are live."""

    def __init__(self) -> None:
        self._live: dict[str, wire.House] = {}
        self._last: wire.House | None = None  # of the newest storyteller seen, alive or not

    def update(self, houses: Mapping[str, wire.House], progress_ms: Mapping[str, float], now_ms: float) -> None:
        """`progress_ms`: when each last made a step or was idle, on Redis' clock as `now_ms` is."""
        self._live = {
            name: house for name, house in houses.items() if now_ms - progress_ms.get(name, 0) <= wire.PRESENCE_S * 1000
        }
        for house in self._live.values():
            self._last = house

    @property
    def unready(self) -> str:
        """Why no story could be told now; '' where one could."""
        if not self._live:
            return "no live storyteller"
        return ""

    @property
    def house(self) -> wire.House | None:
        """What is served here; `None` where no storyteller was ever seen."""
        return self._last

    @property
    def deadline_s(self) -> float:
        return self._last.deadline_s if self._last else 60.0

    @property
    def stories_per_s(self) -> float:
        """Stories that all live storytellers end in a second when their batches are full."""
        return sum(house.batch_size / (house.story_s or UNKNOWN_STORY_S) for house in self._working)

    def eta_s(self, position: int, num_written: int | None = None) -> float:
        """Seconds until a story with so many asks before it begins.

        `num_written` stories are being written; where nobody counted them, as many as the storytellers last said.
        """
        if not self._working:
            return self.deadline_s
        if num_written is None:
            num_written = sum(house.running + house.waiting for house in self._working)
        free = sum(house.batch_size for house in self._working) - num_written
        return max(0, position + 1 - max(0, free)) / self.stories_per_s

    def retry_after_s(self) -> float:
        """Seconds until a place in a full queue is free."""
        return max(0.1, 1 / self.stories_per_s) if self._working else 5.0

    @property
    def story_s(self) -> float:
        """Seconds that a story takes to be written."""
        known = [house.story_s for house in self._working if house.story_s]
        return max(known, default=UNKNOWN_STORY_S)

    @property
    def _working(self) -> list[wire.House]:
        return [house for house in self._live.values() if not house.draining]
