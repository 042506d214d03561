"""A crowd against an address, inside the test's own event loop or as the command that people type."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadbots.campaign import Campaign
from loadbots.config import Config, read_config
from loadbots.metrics import Board
from loadbots.players import knock

ROOT = Path(__file__).parent.parent.parent


def settings(url: str, *flags: str) -> Config:
    door = [] if "--openai" in flags else ["--url", url]
    return read_config([*door, "--metrics-port", "0", "--no-live", *flags], {})


async def play(url: str, *flags: str) -> Campaign:
    """All crowds that the flags ask for."""
    campaign = Campaign(await knock(settings(url, *flags)), Board(), asyncio.Event())
    await campaign.run()
    return campaign


async def row(url: str, *flags: str) -> dict[str, Any]:
    """The only row of a crowd."""
    (only,) = (await play(url, *flags)).rows
    return only


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.out.splitlines()[-1])
        return found


async def command(*flags: str, env: dict[str, str] | None = None) -> Ended:
    """`python -m loadbots`, to its end."""
    process = await start(*flags, env=env)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def start(*flags: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadbots", "--metrics-port", "0", *flags,
        cwd=ROOT, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
