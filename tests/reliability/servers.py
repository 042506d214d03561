"""Redis-compatible servers for tests, and the queue's scripts as plain calls upon them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis import Redis

from storyteller import wire
from storyteller.wire import Key
from tests.processes import Process, Valkey, free_port, wait_until

SERVERS = ["valkey", *(["redis"] if shutil.which("redis-server") else [])]
"""The embedded Valkey always; the machine's own Redis where there is one."""


class RedisServer(Process):
    """The machine's own Redis."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        super().__init__("redis", command, folder, {})
        wait_until(self.answers, f"Redis on {self.port}")

    def answers(self) -> bool:
        return Valkey.answers(self)  # type: ignore[arg-type]


def start(kind: str, folder: Path) -> Valkey | RedisServer:
    return RedisServer(folder) if kind == "redis" else Valkey(folder)


class Queue:
    """One server's queue; each method is one script, with the arguments that the services give it."""

    def __init__(self, url: str) -> None:
        self.redis: Any = Redis.from_url(url, protocol=2)
        names = ("ask", "take", "tell", "beat", "sweep", "handback", "cancel", "heard")
        self._scripts = {name: self.redis.register_script(wire.script(name)) for name in names}

    def call(self, name: str, *args: Any) -> Any:
        return self._scripts[name](args=list(args))

    def ask(self, story: str, player: str = "", *, queue: int = 1000, limit: int = 2, ahead_us: int = 0) -> str:
        return str(
            self.call("ask", story, b"ask " + story.encode(), player, 7, ahead_us, queue, limit, "g", 30_000)[0],
            "utf-8",
        )

    def take(self, teller: str, count: int = 100, held: Sequence[str] = (), deadline_ms: int = 60_000) -> list[Any]:
        return list(self.call("take", teller, count, deadline_ms, *held)[0])

    def tell(self, story: str, attempt: int, number: int, content: wire.Told | wire.Ending) -> str:
        fields = [value for field in content.fields().items() for value in field]
        reason = content.finish_reason if isinstance(content, wire.Ending) else ""
        return str(self.call("tell", story, attempt, number, reason, 3, len(fields), *fields)[0], "utf-8")

    def beat(self, teller: str, *held: tuple[str, int]) -> list[str]:
        return [
            answer.decode() for answer in self.call("beat", teller, b"house", 0, *(x for pair in held for x in pair))
        ]

    def sweep(self, deadline_ms: int = 60_000) -> list[int]:
        return list(self.call("sweep", deadline_ms))

    def told(self, story: str) -> list[wire.Told | wire.Begun | wire.Ending]:
        return [wire.read_entry(fields) for _, fields in self.redis.xrange(Key.TOLD + story)]

    def text(self, story: str) -> str:
        return "".join(entry.text for entry in self.told(story) if isinstance(entry, wire.Told))

    def endings(self, story: str) -> list[wire.Ending]:
        return [entry for entry in self.told(story) if isinstance(entry, wire.Ending)]

    def waiting(self) -> list[str]:
        return [story.decode() for story in self.redis.zrange(Key.WAITING, 0, -1)]

    def pending(self, teller: str | None = None) -> list[str]:
        """Stories in the hands of storytellers, or of one."""
        if not self.redis.exists(Key.ASKS):
            return []
        extra = {} if teller is None else {"consumername": teller}
        found = self.redis.xpending_range(Key.ASKS, Key.GROUP, "-", "+", 1000, **extra)
        entries = [self.redis.xrange(Key.ASKS, one["message_id"], one["message_id"]) for one in found]
        return [entry[0][1][b"story"].decode() for entry in entries]

    def num_asks(self) -> int:
        return int(self.redis.xlen(Key.ASKS))

    def now(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds * 1000 + micros // 1000)

    def settle(self) -> None:
        """As if somebody had swept every second for long."""
        self.redis.hset(Key.PULSE, mapping={"last": self.now(), "since": self.now() - 60_000})

    def pass_lease(self, teller: str) -> None:
        """As if a storyteller had been silent for longer than its lease, while others were not."""
        if self.redis.exists(Key.ASKS):
            found = self.redis.xpending_range(Key.ASKS, Key.GROUP, "-", "+", 1000, consumername=teller)
            for one in found:
                idle = wire.LEASE_S * 1000 + 1
                self.redis.xclaim(Key.ASKS, Key.GROUP, teller, 0, [one["message_id"]], idle=idle, justid=True)
        self.settle()
