"""What players do wrong on purpose: drop the socket, cancel, stop reading, reconnect all at once.

Each story's fate follows from (--seed, player, story), so that two runs misbehave alike. `drop`, `cancel` and `stall`
are shares of the stories, kept closely even by small crowds: lots are spread evenly, not rolled. `storm` is how
often, spread over the run, every socket is cut in the same moment.
A story that ends before its misfortune is due simply ends.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadbots.asks import dice

STALL_S = 12.0
"""How long a stalled player takes nothing: longer than the 10 s that a gateway waits for a slow client."""
LATEST_FRAME = 3
"""A misfortune strikes after so many text frames at the latest; 0 is before the first."""

SPREAD = (0.7548776662466927, 0.5698402909980532)
"""Steps of an additive recurrence that fills a plane evenly: any block of players and stories gets its share."""

Deed = Literal["drop", "cancel", "stall"]


class Fate(msgspec.Struct, frozen=True):
    """What a player does to one story, and after how many text frames."""

    deed: Deed | None = None
    after_frames: int = 0


class Chaos(msgspec.Struct, frozen=True):
    drop: float = 0.0
    cancel: float = 0.0
    stall: float = 0.0
    storm: int = 0

    def fate(self, seed: int, player: int, number: int) -> Fate:
        """One story's fate; warm-up stories and checks (negative numbers) are left alone."""
        if number < 0 or not (self.drop or self.cancel or self.stall):
            return Fate()
        rolled = dice(seed, player, number, "chaos")
        lot = (dice(seed, "chaos").random() + player * SPREAD[0] + number * SPREAD[1]) % 1
        frames = rolled.randint(0, LATEST_FRAME)
        for deed, share in (("drop", self.drop), ("cancel", self.cancel), ("stall", self.stall)):
            if lot < share:
                # a stall before the first text would make that wait the player's own doing
                return Fate(deed, max(1, frames) if deed == "stall" else frames)  # type: ignore[arg-type]
            lot -= share
        return Fate()

    def __str__(self) -> str:
        shares = [f"{deed}={getattr(self, deed):g}" for deed in ("drop", "cancel", "stall") if getattr(self, deed)]
        return ",".join(shares + ([f"storm={self.storm}"] if self.storm else []))


def parse_chaos(text: str) -> Chaos:
    """`drop=0.1,cancel=0.05,stall=0.02,storm`; `ValueError` says what was expected."""
    shares: dict[str, float] = {}
    storm = 0
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name == "storm":
            storm = _count(value) if equals else 1
        elif name in ("drop", "cancel", "stall"):
            shares[name] = _share(name, value)
        else:
            raise ValueError(f"expected drop=, cancel=, stall= or storm, got {part.strip()!r}")
    if sum(shares.values()) > 1:
        raise ValueError(f"expected shares that sum to 1 at most, got {sum(shares.values()):g}")
    return Chaos(**shares, storm=storm)


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"expected {name}= and a share from 0 to 1, got {value!r}")
    return share


def _count(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 100:
        raise ValueError(f"expected storm= and a count from 1 to 100, got {value!r}")
    return int(value)
