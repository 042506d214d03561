"""The search for the knee: the highest rate of asks at which the SLO still holds.

Pure: it names the next rate and is told whether the SLO held. It goes up by half each time until the SLO breaks (or
down by half until it holds, four times at most), then halves the distance between the two.
"""

from __future__ import annotations

import math

FACTOR = 1.5
CLOSE = 1.12
"""The search is over when the bounds are this close to each other."""
MAX_STEPS = 14
MAX_HALVINGS = 4
"""A first rate that is more than sixteen times too high is no beginning: better said soon than searched long."""


class KneeSearch:
    def __init__(self, rate: float) -> None:
        self.holds: float | None = None  # the highest rate that held
        self.breaks: float | None = None  # the lowest rate that broke
        self._steps = self._halvings = 0
        self._next = rate

    @property
    def rate(self) -> float | None:
        """The next rate to try; None when the search is over."""
        near = self.holds and self.breaks and self.breaks / self.holds <= CLOSE
        return None if near or self._steps >= MAX_STEPS or self._halvings > MAX_HALVINGS else self._next

    def judge(self, held: bool) -> None:
        """What came of the last rate."""
        self._steps += 1
        if held:
            self.holds = self._next
        else:
            self.breaks = self._next
        if self.breaks is None:
            self._next *= FACTOR
        elif self.holds is None:
            self._halvings += 1
            self._next /= 2
        else:
            self._next = math.sqrt(self.holds * self.breaks)

    def __str__(self) -> str:
        if self.holds is None:
            return f"knee: none, the SLO breaks already at {self.breaks:.3g} asks a second"
        if self.breaks is None:
            return f"knee: not reached, the SLO holds at {self.holds:.3g} asks a second"
        return f"knee: the SLO holds at {self.holds:.3g} asks a second and breaks at {self.breaks:.3g}"
