"""Doing what `loadbots.chaos` has decided: to one story, on its connection."""

from __future__ import annotations

import asyncio

from gateway.wire import Cancel
from loadbots.chaos import STALL_S, Fate
from loadbots.connection import Connection
from loadbots.told import Telling


async def misbehave(connection: Connection, request: str, telling: Telling, fate: Fate) -> None:
    """Cancel the story, cut its socket, or take nothing for a while."""
    if fate.deed == "cancel":
        telling.told.cancelled = True
        await connection.send(Cancel(request))
    elif fate.deed == "drop":
        connection.cut()
    elif fate.deed == "stall":
        telling.told.stalled = True
        connection.stop_reading()
        await asyncio.sleep(STALL_S)
        connection.read_again()
        telling.pause()
