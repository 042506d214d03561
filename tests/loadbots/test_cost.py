"""The bots must not be the bottleneck."""

from __future__ import annotations

import asyncio
import sys

from tests.loadbots.crowds import ROOT


async def test_2000_idle_players_fit_into_100_mib_of_one_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.bots", "--idle", "2000", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert 10 < float(out) < 100
