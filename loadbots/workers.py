"""A crowd over several processes: what travels between them, and the parent's side.

Each process runs `python -m loadbots.worker`, gets its job and its commands on stdin and answers on stdout, each as a
length and a msgpack message. Records travel whole, so the merged row is the one that a single process would have made.
Whatever happens, `disperse` leaves no process behind.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec

from loadbots.config import Config
from loadbots.crowd import Progress, Sink
from loadbots.told import Amendment, Strain, Told

END_S = 10.0
"""How long a process may take to end before it is killed."""
MAX_MESSAGE = 64 * 1024 * 1024


class WorkerLostError(Exception):
    """A bots' process ended or failed; one line for a person."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """A process's share of a crowd."""

    config: Config
    indices: list[int]
    step: int
    size: int
    arrivals: list[tuple[int, float]] | None


class Gather(msgspec.Struct, frozen=True, tag=True):
    pass


class Perform(msgspec.Struct, frozen=True, tag=True):
    start: float


class LookBack(msgspec.Struct, frozen=True, tag=True):
    repeat: bool


class Disperse(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The last command is done, or it failed with this."""

    failed: str | None = None


Command = Gather | Perform | LookBack | Disperse
Answer = Told | Amendment | Strain | Progress | Ready


def _hook(kind: type, value: Any) -> Any:
    return Counter(value) if kind is Counter or getattr(kind, "__origin__", None) is Counter else value


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer, dec_hook=_hook)
_commands = msgspec.msgpack.Decoder(Job | Command)


def pack(message: Job | Command | Answer) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "big") + data


async def next_message(stream: asyncio.StreamReader) -> bytes | None:
    """None at the end of the stream."""
    try:
        length = int.from_bytes(await stream.readexactly(4), "big")
        if length > MAX_MESSAGE:
            return None
        return await stream.readexactly(length)
    except asyncio.IncompleteReadError:
        return None


def read_command(data: bytes) -> Job | Command:
    command: Job | Command = _commands.decode(data)
    return command


class Worker:
    """One process, seen from the parent."""

    def __init__(self, process: Process, sink: Sink) -> None:
        self.progress = Progress()
        self._process = process
        self._sink = sink
        self._ready: asyncio.Future[None] | None = None
        self._lost = False
        self._reading = asyncio.create_task(self._read())

    async def order(self, command: Command) -> None:
        """Give a command and wait until it is done."""
        if self._lost:
            raise WorkerLostError("a bots' process ended before its crowd did")
        self._ready = asyncio.get_running_loop().create_future()
        await self.tell(command)
        await self._ready

    async def tell(self, message: Job | Command) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pack(message))
        with suppress(ConnectionError):
            await self._process.stdin.drain()

    async def end(self) -> None:
        try:
            async with asyncio.timeout(END_S):
                await self.tell(Disperse())
                await self._reading
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while (data := await next_message(self._process.stdout)) is not None:
            answer = _answers.decode(data)
            if isinstance(answer, Progress):
                self.progress = answer
            elif not isinstance(answer, Ready):
                self._sink(answer)
            elif self._ready and not self._ready.done():
                if answer.failed:
                    self._ready.set_exception(WorkerLostError(answer.failed))
                else:
                    self._ready.set_result(None)
        self._lost = True
        if self._ready and not self._ready.done():
            self._ready.set_exception(WorkerLostError("a bots' process ended before its crowd did"))


class Company:
    """A crew of several processes."""

    def __init__(
        self, config: Config, players: int, arrivals: list[tuple[int, float]] | None, sink: Sink, processes: int
    ) -> None:
        share = msgspec.structs.replace(config, max_players=max(1, config.max_players // processes))
        self._jobs = [
            Job(
                share,
                list(range(place, players, processes)),
                processes,
                players,
                None if arrivals is None else arrivals[place::processes],
            )
            for place in range(processes)
        ]
        self._sink = sink
        self._workers: list[Worker] = []

    @property
    def progress(self) -> Progress:
        parts = [worker.progress for worker in self._workers]
        return Progress(
            sum(part.players for part in parts),
            sum(part.asking for part in parts),
            sum(part.begun for part in parts),
            sum(part.frames for part in parts),
        )

    async def gather(self) -> None:
        for job in self._jobs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadbots.worker", stdin=PIPE, stdout=PIPE, limit=MAX_MESSAGE
            )
            self._workers.append(Worker(process, self._sink))
            await self._workers[-1].tell(job)
        await self._all(Gather())

    async def perform(self, start: float) -> None:
        await self._all(Perform(start))

    async def look_back(self, *, repeat: bool) -> None:
        first, *others = self._workers
        await asyncio.gather(first.order(LookBack(repeat)), *(worker.order(LookBack(False)) for worker in others))

    async def disperse(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.end())

    async def _all(self, command: Command) -> None:
        await asyncio.gather(*(worker.order(command) for worker in self._workers))
