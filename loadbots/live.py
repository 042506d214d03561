"""The live view on a terminal's stderr: how many players, what is in flight, how fast, how long they wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadbots.measure import Crew, Plan
from loadbots.table import spread
from loadbots.tally import Tally, percentiles

LOOK_S = 0.25
WINDOW = 20
"""Looks that the rates are taken over: five seconds."""
RECENT = 500
"""Samples that the percentiles are taken over."""


class View:
    def __init__(self, plan: Plan, tally: Tally, crew: Crew) -> None:
        self._plan, self._tally, self._crew = plan, tally, crew
        self._began = time.monotonic()
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)  # when, frames, stories

    def render(self) -> Group:
        tally, now, progress = self._tally, time.monotonic(), self._crew.progress
        self._looks.append((now, progress.frames, tally.told))
        then, frames, stories = self._looks[0]
        seconds = max(LOOK_S, now - then)
        per_frame = tally.tokens / tally.frames if tally.frames else 1.0
        facts = Table.grid(padding=(0, 2))
        for name, fact in (
            ("players", f"{progress.players}"),
            ("in flight", f"{progress.asking}"),
            ("tokens/s", f"{per_frame * (progress.frames - frames) / seconds:.0f}"),
            ("stories/s", f"{(tally.told - stories) / seconds:.2f}"),
            ("first text ms", spread(percentiles(tally.first_text[-RECENT:], 1000)) + "  p50 / p95 / p99"),
            ("gap ms", spread(percentiles(tally.gaps[-RECENT:], 1000))),
            ("errors", f"{tally.errors.total()}   broken {tally.broken}   resumed {tally.resumed}"),
        ):
            facts.add_row(Text(name, style="dim"), fact)
        return Group(Text(self._plan.title, style="bold"), facts, self._bar(now))

    def _bar(self, now: float) -> Table:
        done, of = self._tally.asked, self._plan.total
        text = f"{done} of {of} stories"
        if of is None:
            done, of = int(now - self._began), max(1, int(self._plan.duration or 1))
            text = f"{done} of {of} s"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=of, completed=min(done, of), width=48), text)
        return bar


@asynccontextmanager
async def shown(console: Console, plan: Plan, tally: Tally, crew: Crew) -> AsyncIterator[None]:
    """The view, as long as the block runs."""
    view = View(plan, tally, crew)

    async def look(live: Live) -> None:
        while True:
            live.update(view.render(), refresh=True)
            await asyncio.sleep(LOOK_S)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        looking = asyncio.create_task(look(live))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
