"""One crowd, from connecting to its row: in this process or spread over several, with the same outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from loadbots.arrivals import schedule
from loadbots.config import Config
from loadbots.crowd import Progress, Sink, Squad
from loadbots.players import new_player
from loadbots.tally import Tally
from loadbots.workers import Company

OPEN_LOOP_S, KNEE_STEP_S = 60.0, 20.0
POOL = 16
"""Players of an open loop to begin with, where `--players` says nothing."""
START_IN_S = 0.05


class Plan(msgspec.Struct, frozen=True):
    """One crowd."""

    title: str
    players: int
    total: int | None = None
    """Asks that there will be; None: as many as fit into `duration`."""
    duration: float | None = None
    rate: float | None = None
    arrivals: list[tuple[int, float]] | None = None


class Crew(Protocol):
    """A squad, or several in processes of their own."""

    @property
    def progress(self) -> Progress: ...
    async def gather(self) -> None: ...
    async def perform(self, start: float) -> None: ...
    async def look_back(self, *, repeat: bool) -> None: ...
    async def disperse(self) -> None: ...


def plans(config: Config) -> Iterator[Plan]:
    """One for each number of `--players`."""
    if config.arrival == "closed":
        for players in config.players or (1,):
            total = players * config.stories if config.duration is None else None
            yield Plan(f"{players} players", players, total, config.duration)
    else:
        assert config.rate is not None
        for players in config.players or (POOL,):
            yield open_plan(config, players, config.rate, config.duration or OPEN_LOOP_S)


def open_plan(config: Config, players: int, rate: float, duration: float) -> Plan:
    """Asks by the clock. A knee search without `--arrival` is Poisson."""
    kind = "poisson" if config.arrival == "closed" else config.arrival
    arrivals = schedule(
        kind, rate, duration, config.seed,
        ramp_to=config.ramp_to, burstiness=config.burstiness, spike=config.spike,
    )  # fmt: skip
    return Plan(f"{kind}, {rate:.3g} asks/s for {duration:g} s", players, len(arrivals), duration, rate, arrivals)


def crew_for(config: Config, plan: Plan, sink: Sink) -> Crew:
    processes = min(config.processes, plan.players)
    if processes > 1:
        return Company(config, plan.players, plan.arrivals, sink, processes)
    return Squad(config, range(plan.players), plan.players, plan.arrivals, sink, new_player)


async def measure(
    config: Config, plan: Plan, tally: Tally, crew: Crew, stop: asyncio.Event, earlier: list[tuple[str, Tally]]
) -> dict[str, Any]:
    """The crowd's row. When `stop` is set before the end, the row tells what was heard until then."""
    acting = asyncio.create_task(_act(crew))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((acting, stopping), return_when=asyncio.FIRST_COMPLETED)
        there = crew.progress
        if acting.done():
            acting.result()
    finally:
        for task in (acting, stopping):
            task.cancel()
        await asyncio.gather(acting, stopping, return_exceptions=True)
        await crew.disperse()
    if not config.openai:
        for name, other in earlier:
            tally.compare(other, name)
    grown = plan.arrivals is not None and config.players is None
    row = tally.row(there.players if grown else plan.players)
    return row | {
        "arrival": config.arrival if plan.arrivals is None or config.arrival != "closed" else "poisson",
        "rate": plan.rate,
        "chaos": str(config.chaos),
        "seed": config.seed,
        "max_tokens": config.max_tokens,
        "server": f"{config.openai} {config.model}" if config.openai else " ".join(config.url),
        "interrupted": stop.is_set(),
        "unfinished": there.asking,
        "slo_missed": config.slo is not None and (row["slo_kept"] or 0.0) < config.slo_share,
        "differences": [],
    }


async def _act(crew: Crew) -> None:
    await crew.gather()
    await crew.perform(time.monotonic() + START_IN_S)
    await crew.look_back(repeat=True)
