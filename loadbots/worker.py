"""`python -m loadbots.worker`: one process of a crowd, led by its parent over stdin and stdout (`loadbots.workers`).

It ends when it is told to, or when its stdin ends because the parent is gone. Signals are the parent's business.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

import uvloop

from loadbots.crowd import Squad
from loadbots.players import new_player
from loadbots.workers import (
    Answer,
    Command,
    Disperse,
    Gather,
    Job,
    LookBack,
    Perform,
    Ready,
    next_message,
    pack,
    read_command,
)  # fmt: skip

PROGRESS_S = 0.25


async def work() -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer)
    stdout, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout.buffer)

    def say(answer: Answer) -> None:
        stdout.write(pack(answer))

    data = await next_message(stdin)
    job = read_command(data) if data else None
    if not isinstance(job, Job):
        return
    squad = Squad(
        job.config, job.indices, job.size, job.arrivals, say, new_player, step=job.step
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(_tell_progress(squad, stdout))
        acting: asyncio.Task[None] | None = None
        while (data := await next_message(stdin)) is not None:
            command = read_command(data)
            if isinstance(command, Disperse | Job):
                break
            acting = group.create_task(_act(squad, command, stdout))
        for task in (telling, acting):
            if task:
                task.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            await squad.disperse()
    stdout.close()


async def _act(squad: Squad, command: Command, stdout: asyncio.WriteTransport) -> None:
    """One command, answered whatever comes of it: the parent waits."""
    failed = None
    try:
        if isinstance(command, Gather):
            await squad.gather()
        elif isinstance(command, Perform):
            await squad.perform(command.start)
        elif isinstance(command, LookBack):
            await squad.look_back(repeat=command.repeat)
    except Exception as unforeseen:
        failed = f"a bots' process failed: {unforeseen!r}"
    stdout.write(pack(squad.progress))
    stdout.write(pack(Ready(failed)))


async def _tell_progress(squad: Squad, stdout: asyncio.WriteTransport) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        stdout.write(pack(squad.progress))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    uvloop.run(work())
