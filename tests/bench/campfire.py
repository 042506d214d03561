"""500 listeners around one story against 500 asks: frames a second, and what they cost in processor time.

    python -m tests.bench.campfire [--players 500]

One gateway, one storyteller and an embedded Valkey as real processes, a checkpoint of random weights. All players live
in this process, which takes its share of the machine; the services' own processor seconds are counted apart from it.
The last line is the table as one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from gateway import wire
from tests.processes import Process, Stack, stack, wait_until
from tests.reliability.crowd import ask, player, receive
from tests.reliability.house import make_model

LONG, SHORT = 900, 100
"""Tokens of the one story, and of each of the many."""
SETTINGS = {"STORYTELLER_MAX_TOKENS": str(LONG), "STORYTELLER_DEADLINE_S": "600"}
Wish = wire.Ask | wire.Listen
Row = dict[str, str | int | float]


def cpu_seconds(processes: dict[str, Process]) -> dict[str, float]:
    times = {name: psutil.Process(one.process.pid).cpu_times() for name, one in processes.items()}
    return {name: one.user + one.system for name, one in times.items()}


async def hear(url: str, name: str, wishes: asyncio.Future[list[Wish]], number: int) -> tuple[int, float]:
    """Text frames until the ending, and when the last of them came."""
    async with player(url, name) as socket:
        wish = (await asyncio.shield(wishes))[number]
        await socket.send(wire.encode(wish))
        num_frames = 0
        while not isinstance(heard := await receive(socket), wire.Done):
            num_frames += isinstance(heard, wire.Text)
        return num_frames, time.monotonic()


async def measure(
    title: str, url: str, processes: dict[str, Process], num_players: int, wish: Callable[[], Awaitable[list[Wish]]]
) -> Row:
    """Everybody is connected and welcomed first; then all begin at once."""
    wishes: asyncio.Future[list[Wish]] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        hearings = [tasks.create_task(hear(url, f"{title} {number}", wishes, number)) for number in range(num_players)]
        await asyncio.to_thread(wait_until, lambda: connections(processes["gateway"]) >= num_players, "all connections")
        before, begun = cpu_seconds(processes), time.monotonic()
        wishes.set_result(await wish())
    after = cpu_seconds(processes)
    heard = [hearing.result() for hearing in hearings]
    num_frames, seconds = sum(count for count, _ in heard), max(at for _, at in heard) - begun
    row: Row = {"what": title, "players": num_players, "frames": num_frames, "seconds": round(seconds, 2)}
    row["frames_per_second"] = round(num_frames / seconds)
    for name, total in after.items():
        row[f"{name}_cpu_s"] = round(total - before[name], 2)
    row["cpu_ms_per_1000_frames"] = round(sum(after[n] - before[n] for n in after) / num_frames * 1e6)
    return row


def connections(gateway: Process) -> int:
    return len(
        [one for one in psutil.Process(gateway.process.pid).net_connections("tcp") if one.status == "ESTABLISHED"]
    )


async def campfire(url: str, processes: dict[str, Process], num_players: int) -> Row:
    """One asks; everybody else listens to its story from the beginning."""
    async with player(url, "asker") as asker:

        async def wish() -> list[Wish]:
            await asker.send(wire.encode(ask(0, tokens=LONG)))
            queued = await receive(asker)
            assert isinstance(queued, wire.Queued)
            return [wire.Listen("l", queued.story) for _ in range(num_players)]

        return await measure("listeners to one story", url, processes, num_players, wish)


async def crowd(url: str, processes: dict[str, Process], num_players: int) -> Row:
    """Everybody asks for a story of their own."""

    async def wish() -> list[Wish]:
        return [ask(number, tokens=SHORT) for number in range(num_players)]

    return await measure("asks", url, processes, num_players, wish)


def run(running: Stack, num_players: int) -> list[Row]:
    gateway = running.gateway(GATEWAY_PLAYER_LIMIT="1000")
    processes: dict[str, Process] = {
        "gateway": gateway,
        "storyteller": running.storyteller(**SETTINGS),
        "redis": running.valkey,
    }
    wait_until(gateway.is_ready, "a ready gateway")
    return [asyncio.run(kind(gateway.url, processes, num_players)) for kind in (campfire, crowd)]


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.bench.campfire")
    arguments.add_argument("--players", type=int, default=500)
    num_players: int = arguments.parse_args().players
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), make_model(Path(folder) / "model")) as running:
        rows = run(running, num_players)
    for row in rows:
        sys.stdout.write("".join(f"{key:>24} {value}\n" for key, value in row.items()) + "\n")
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
