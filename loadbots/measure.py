"""One crowd, from connecting to its row: in this process or spread over several, with the same outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from loadbots.arrivals import Arrivals
from loadbots.bot import Bot
from loadbots.config import Config
from loadbots.crowd import Progress, Squad
from loadbots.tally import Tally

DURATION_S = 60.0
POOL = 16
START_IN_S = 0.05


class Plan(msgspec.Struct, frozen=True):
    """One crowd."""

    players: int
    rate: float | None = None
    arrivals: Arrivals | None = None


class Crew(Protocol):
    """A squad, or several in processes of their own."""

    @property
    def progress(self) -> Progress: ...
    async def gather(self) -> None: ...
    async def perform(self, start: float) -> None: ...
    async def look_back(self, *, repeat: bool) -> None: ...
    async def disperse(self) -> None: ...


Watch = Callable[[Plan, Tally, Crew], None]
"""Told when a crowd begins."""


def crew_for(config: Config, plan: Plan, tally: Tally) -> Crew:
    return Squad(config, range(plan.players), plan.players, plan.arrivals, tally.take, Bot)


async def measure(config: Config, plan: Plan, tally: Tally, crew: Crew, stop: asyncio.Event) -> dict[str, Any]:
    """The crowd's row. When `stop` is set before the end, the row tells what was heard until then."""
    acting = asyncio.create_task(_act(crew))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((acting, stopping), return_when=asyncio.FIRST_COMPLETED)
        unfinished = crew.progress.asking
        if acting.done():
            acting.result()
    finally:
        for task in (acting, stopping):
            task.cancel()
        await asyncio.gather(acting, stopping, return_exceptions=True)
        await crew.disperse()
    row = tally.row(plan.players)
    if plan.rate is not None:
        row["rate"] = plan.rate
    return row | {
        "interrupted": stop.is_set(),
        "unfinished": unfinished,
        "slo_missed": config.slo is not None and (row["slo_kept"] or 0.0) < config.slo_share,
    }


async def _act(crew: Crew) -> None:
    await crew.gather()
    await crew.perform(time.monotonic() + START_IN_S)
    await crew.look_back(repeat=True)
