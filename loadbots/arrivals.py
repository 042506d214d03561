"""When asks come in an open loop: moments in seconds from the beginning, drawn from the seed alone.

Gaps are drawn with mean 1 (gamma; shape 1 is Poisson), then time is stretched to the wanted rate, so that a ramp keeps
the burstiness. A spike puts its asks on one moment half-way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Literal

from loadbots.asks import dice

Arrival = Literal["closed", "constant", "poisson", "gamma", "spike"]
ARRIVALS: tuple[Arrival, ...] = ("closed", "constant", "poisson", "gamma", "spike")
Arrivals = Sequence[tuple[int, float]]
"""Number of the ask and its moment."""


def schedule(
    kind: Arrival, rate: float, duration: float, seed: int,
    *, ramp_to: float | None = None, burstiness: float = 1.0, spike: int = 0,
) -> list[tuple[int, float]]:  # fmt: skip
    """All asks of a crowd, in the order of their moments."""
    moments = []
    rolled = dice(seed, kind, rate, duration)
    work = 0.0 if kind == "constant" else _gap(kind, burstiness, rolled)
    while (moment := _moment(work, rate, rate if ramp_to is None else ramp_to, duration)) < duration:
        moments.append(moment)
        work += _gap(kind, burstiness, rolled)
    if kind == "spike":
        moments = sorted([*moments, *[duration / 2] * spike])
    return list(enumerate(moments))


def _gap(kind: Arrival, burstiness: float, rolled: Random) -> float:
    if kind == "constant":
        return 1.0
    shape = burstiness if kind == "gamma" else 1.0
    return rolled.gammavariate(shape, 1 / shape)


def _moment(work: float, rate: float, ramp_to: float, duration: float) -> float:
    """When the asks expected so far reach `work`, at a rate that goes evenly from `rate` to `ramp_to`."""
    slope = (ramp_to - rate) / duration
    if abs(slope) < 1e-12:
        return work / rate
    square = rate * rate + 2 * slope * work
    return (math.sqrt(square) - rate) / slope if square >= 0 else math.inf
