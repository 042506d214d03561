"""All crowds of one run, one after the other: their rows, and what the run as a whole came to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rich.console import Console

from loadbots.config import Config
from loadbots.knee import KneeSearch
from loadbots.live import shown
from loadbots.measure import KNEE_STEP_S, POOL, Crew, Plan, crew_for, measure, open_plan, plans
from loadbots.metrics import Board
from loadbots.reconcile import NoMetricsError, Reconciliation
from loadbots.tally import Tally
from loadbots.told import Word

FIRST_RATE = 0.5
MIN_ASKS = 10
"""A step of the knee search lasts long enough for so many asks."""
Row = dict[str, Any]


class Campaign:
    def __init__(self, config: Config, board: Board, stop: asyncio.Event) -> None:
        self.rows: list[Row] = []
        self.knee: KneeSearch | None = None
        self._config = config
        self._board = board
        self._stop = stop
        self._earlier: list[tuple[str, Tally]] = []  # crowds so far, by name
        self._screen = Console(stderr=True) if config.live and sys.stderr.isatty() else None

    async def run(self) -> None:
        if self._config.find_knee:
            await self._find_knee()
            return
        for plan in plans(self._config):
            if not self._stop.is_set():
                await self._send(plan)

    async def _find_knee(self) -> None:
        config = self._config
        self.knee = KneeSearch(config.rate or FIRST_RATE)
        players = (config.players or (POOL,))[0]
        while (rate := self.knee.rate) is not None and not self._stop.is_set():
            duration = max(config.duration or KNEE_STEP_S, MIN_ASKS / rate)
            row = await self._send(open_plan(config, players, rate, duration))
            if row["interrupted"]:
                return
            self.knee.judge(not row["slo_missed"])
            if not any(row["endings"].get(ending) for ending in ("stop", "length")):
                return  # nobody tells stories: a lower rate would not help

    async def _send(self, plan: Plan) -> Row:
        """One crowd."""
        config, tally = self._config, Tally(self._config.slo)

        def take(word: Word) -> None:
            tally.take(word)
            self._board.take(word)

        crew = crew_for(config, plan, take)
        self._board.progress = lambda: crew.progress
        books = Reconciliation(config.reconcile) if config.reconcile else None
        if books:
            await books.begin()
        async with self._view(plan, tally, crew):
            row = await measure(config, plan, tally, crew, self._stop, self._earlier)
        if books and not row["interrupted"]:
            try:
                row["differences"] = await books.differences(tally.everything)
            except NoMetricsError as gone:
                row["differences"] = [str(gone)]
        self._earlier.append((f"the crowd of {plan.players}", tally))
        self.rows.append(row)
        return row

    def _view(self, plan: Plan, tally: Tally, crew: Crew) -> AbstractAsyncContextManager[None]:
        return shown(self._screen, plan, tally, crew) if self._screen else nullcontext()


def fine(rows: Sequence[Row], knee: KneeSearch | None) -> bool:
    """The verdict: nothing broken, something told, the SLO kept, the counts equal. A knee search breaks the SLO on
    purpose; there it must have held somewhere."""
    for row in rows:
        through = sum(row["endings"].get(ending, 0) for ending in ("stop", "length", "cancelled"))
        broken = row["broken_stories"] or row["lost_frames"] or row["repeated_frames"] or row["differences"]
        if broken or (knee is None and (row["slo_missed"] or not through)):
            return False
    return bool(rows) and (knee is None or knee.holds is not None)
