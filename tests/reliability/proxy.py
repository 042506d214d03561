"""A TCP proxy before Redis that loses what the server says: the command was run, its caller never hears of it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

from tests.processes import free_port


class Proxy:
    """Runs in a thread of its own. `loss` may be changed at any time."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.loss = 0.0  # the share of answers that are lost, and their connection with them
        self.num_lost = 0
        self.num_commands = 0  # pieces that clients sent
        self._upstream = port
        self._dice = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, "127.0.0.1", self.port))

    def end(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._writers.add(up_writer)
            try:
                commands = asyncio.create_task(self._commands(reader, up_writer))
                answers = asyncio.create_task(self._answers(up_reader, writer))
                await asyncio.wait((commands, answers), return_when=asyncio.FIRST_COMPLETED)
                for task in (commands, answers):
                    task.cancel()
                await asyncio.gather(commands, answers, return_exceptions=True)
            finally:
                self._writers.discard(up_writer)
                up_writer.transport.abort()
        except OSError:
            pass  # Redis is away
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _commands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.num_commands += 1
            writer.write(data)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._dice.random() < self.loss:
                self.num_lost += 1
                return
            writer.write(data)
            await writer.drain()
