"""What the bots cost: processor time per 1,000 frames against a plain client loop, and memory of idle players.

    python -m tests.bench.bots                  both, as a table
    python -m tests.bench.bots --idle 2000      memory of so many connected players, in MiB, as one number

The server runs in a process of its own and sends the same frames to both clients, each in a process of its own too.
The plain loop is what anyone would write: `async for` and `json.loads`, on uvloop like the bots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from typing import Any

import psutil
import uvloop
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from gateway.wire import (
    PROTOCOL,
    Ask,
    Done,
    Hello,
    Limits,
    Queued,
    Text,
    Timing,
    Usage,
    Welcome,
    decode_client,
    encode,
)  # fmt: skip

FRAMES = 200
PAUSE_S = 0.02
PLAYERS, STORIES = 50, 4
WORDS = ["dragon", "castle", "brave"]


async def answer(socket: ServerConnection) -> None:
    """Tell stories of `FRAMES` frames for ever."""
    try:
        await socket.recv()
        await socket.send(encode(Welcome(PROTOCOL, "player", Limits())))
        async for data in socket:
            ask = decode_client(data)
            assert isinstance(ask, Ask)
            assert ask.seed is not None
            await socket.send(encode(Queued(ask.id, "story", 0, 0)))
            for number in range(FRAMES):
                await asyncio.sleep(PAUSE_S)
                await socket.send(encode(Text(ask.id, "story", f"1-{number}", " once upon a time")))
            usage, timing = Usage(30, FRAMES), Timing(0, 1, 2)
            await socket.send(encode(Done(ask.id, "story", "1-end", "length", usage, ask.seed, timing)))
    except ConnectionClosed:
        return


async def run_server() -> None:
    async with serve(answer, "127.0.0.1", 0, compression=None, ping_interval=None, backlog=1024) as server:
        sys.stdout.write(f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}\n")
        sys.stdout.flush()
        await server.wait_closed()


async def plain(url: str) -> float:
    """Processor milliseconds per 1,000 frames of a plain loop."""
    count = 0

    async def player(index: int) -> None:
        nonlocal count
        async with connect(url, compression=None, proxy=None) as socket:
            await socket.send(encode(Hello(PROTOCOL)))
            for number in range(STORIES):
                ask = {"type": "ask", "id": f"a{number}", "words": WORDS, "seed": index}
                await socket.send(json.dumps(ask))
                async for data in socket:
                    frame = json.loads(data)
                    count += frame["type"] == "text"
                    if frame["type"] == "done":
                        break

    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for index in range(PLAYERS):
            group.create_task(player(index))
    return 1e6 * (time.process_time() - began) / count


async def bots(url: str) -> float:
    """The same of the bots, with every check they make on frames."""
    from loadbots.campaign import Campaign
    from loadbots.config import read_config
    from loadbots.metrics import Board

    flags = ["--url", url, "--players", str(PLAYERS), "--stories", str(STORIES), "--max-tokens", str(FRAMES)]
    began = time.process_time()
    campaign = Campaign(read_config([*flags, "--verify", "0"], {}), Board(), asyncio.Event())
    await campaign.run()
    spent = time.process_time() - began
    (row,) = campaign.rows
    return 1e6 * spent / (int(row["frames"]) + FRAMES)  # with the first story told once more


async def idle(url: str, players: int) -> float:
    """MiB of a process with so many connected bots."""
    from loadbots.config import read_config
    from loadbots.crowd import Squad
    from loadbots.players import new_player

    squad = Squad(read_config(["--url", url], {}), range(players), players, None, lambda word: None, new_player)
    await squad.gather()
    await asyncio.sleep(1)  # what connecting left behind is given back
    memory = psutil.Process().memory_info().rss
    assert squad.progress.players == players
    await squad.disperse()
    return memory / 2**20


def measured(kind: str, url: str, *more: str) -> float:
    command = [sys.executable, "-m", "tests.bench.bots", f"--{kind}", *more, "--url", url]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--serve", "--plain", "--bots"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--idle", type=int, metavar="PLAYERS", help="only the memory of so many idle players")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.serve:
        uvloop.run(run_server())
    elif given.url:
        work: Any = plain(given.url) if given.plain else bots(given.url)
        if given.idle:
            work = idle(given.url, given.idle)
        sys.stdout.write(f"{uvloop.run(work):.2f}\n")
    else:
        with_server(given.idle)


def with_server(players: int | None) -> None:
    command = [sys.executable, "-m", "tests.bench.bots", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            if players:
                sys.stdout.write(f"{measured('idle', url, str(players)):.1f}\n")
                return
            loop, ours = measured("plain", url), measured("bots", url)
            memory = measured("idle", url, "2000")
            sys.stdout.write(
                f"{PLAYERS} players, {STORIES} stories of {FRAMES} frames each\n"
                f"plain websockets loop  {loop:6.1f} ms of processor time per 1,000 frames\n"
                f"loadbots               {ours:6.1f} ms, {ours / loop:.2f} times the plain loop\n"
                f"2,000 idle players     {memory:6.1f} MiB in one process\n"
            )
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
