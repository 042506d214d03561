"""One whole stack that many tests disturb: two gateways, two storytellers, and Redis behind a proxy that can fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from storyteller.wire import Key
from tests.processes import Gateway, Stack, Storyteller, Valkey, wait_until
from tests.reliability.proxy import Proxy

TELLER = {
    "STORYTELLER_THREADS": "1",
    "STORYTELLER_BATCH_SIZE": "6",
    "STORYTELLER_MAX_TOKENS": "1000",
    "STORYTELLER_KV_TOKENS": "24576",
    "STORYTELLER_DEADLINE_S": "40",
    "OMP_NUM_THREADS": "1",
}
AOF = ("--appendonly", "yes", "--appendfsync", "everysec")


def make_model(folder: Path) -> Path:
    """A model slow enough that a story of 400 tokens takes some seconds; random weights."""
    import torch
    import transformers

    from tests.checkpoints import make_tokenizer

    folder.mkdir(parents=True)
    config = transformers.LlamaConfig(
        vocab_size=make_tokenizer(folder), max_position_embeddings=1024, hidden_size=512, num_hidden_layers=20,
        num_attention_heads=8, num_key_value_heads=2, intermediate_size=1536, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(torch.randn_like(weights) * 0.08)
    model.save_pretrained(str(folder))
    return folder


class House:
    """Processes may be killed by any test; `furnish` starts what is missing for the next one."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.stack = Stack(folder, model)
        self.stack.valkey.kill()
        self.start_redis()
        self.proxy = Proxy(self.stack.valkey.port)
        self.gateways: list[Gateway] = []
        self.storytellers: list[Storyteller] = []
        self.furnish(storytellers=1)  # what it compiles the second one finds
        self.furnish()

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    @property
    def redis(self) -> Any:
        """A fresh connection, not through the proxy."""
        return Redis.from_url(self.stack.valkey.url, protocol=2)

    def start_redis(self) -> None:
        """Redis on the same port, with what its log holds."""
        valkey = Valkey(self.stack.folder, self.stack.valkey.port, *AOF)
        self.stack.valkey = valkey
        self.stack.processes.append(valkey)

    def gateway(self, **env: str) -> Gateway:
        gateway = Gateway(self.stack.folder, self.proxy.url, 0, **env)
        self.stack.processes.append(gateway)
        return gateway

    def storyteller(self, **env: str) -> Storyteller:
        storyteller = Storyteller(self.stack.folder, self.proxy.url, self.stack.model, **(TELLER | env))
        self.stack.processes.append(storyteller)
        return storyteller

    def furnish(self, storytellers: int = 2) -> None:
        """Two gateways and at least so many storytellers, ready; a healthy Redis; nothing left to tell."""
        self.proxy.loss = 0.0
        self.gateways = [one for one in self.gateways if one.process.poll() is None]
        self.storytellers = [one for one in self.storytellers if one.process.poll() is None]
        self.gateways += [self.gateway() for _ in range(2 - len(self.gateways))]
        self.storytellers += [self.storyteller() for _ in range(storytellers - len(self.storytellers))]
        wait_until(lambda: sum(one.is_ready() for one in self.storytellers) >= storytellers, "ready storytellers")
        for gateway in self.gateways:
            wait_until(gateway.is_ready, "a ready gateway")
        wait_until(self.is_idle, "an end of what the last test left")

    def holder_of(self, story: str) -> Storyteller | None:
        """The storyteller in whose hands a story is; its name in Redis holds its process id."""
        with self.redis as redis:
            entry = redis.hget(Key.STORY + story, "entry")
            found = redis.xpending_range(Key.ASKS, Key.GROUP, entry, entry, 1) if entry else []
        for one in self.storytellers:
            if found and f"-{one.process.pid}-" in found[0]["consumer"].decode():
                return one
        return None

    def holdings(self) -> list[int]:
        """How many stories each storyteller has in its hands."""
        with self.redis as redis:
            found = redis.xpending_range(Key.ASKS, Key.GROUP, "-", "+", 1000) if redis.exists(Key.ASKS) else []
        names = [one["consumer"].decode() for one in found]
        return [sum(f"-{one.process.pid}-" in name for name in names) for one in self.storytellers]

    def is_idle(self) -> bool:
        """Nothing waits, nothing is written, nobody's place is taken."""
        with self.redis as redis:
            return not (redis.zcard(Key.WAITING) or redis.xlen(Key.ASKS) or redis.keys(Key.PLAYER + "*"))

    def end(self) -> None:
        self.stack.end()
        self.proxy.end()


@contextmanager
def house(folder: Path, model: Path) -> Iterator[House]:
    running = House(folder, model)
    try:
        yield running
    finally:
        for process in running.stack.processes:
            if process.process.poll() is None:
                process.signal(signal.SIGCONT)
        running.end()
