"""The storyteller's settings: read once from the environment, checked, never changed."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from storyteller.wire import setting

Port = Annotated[int, setting("a port from 1 to 65535", "metrics, /livez and /readyz", ge=1, le=65535)]


class Config(msgspec.Struct, frozen=True):
    """One storyteller. Zero or nothing where a value is found out at start."""

    redis_url: Annotated[
        str, setting("redis://, rediss:// or unix:// and an address", "Redis 7.0 or newer, or Valkey 8 or newer",
                     pattern="^(rediss?|unix)://")
    ] = msgspec.field(default="redis://127.0.0.1:6379/0", name="REDIS_URL")  # fmt: skip
    model: Annotated[
        str, setting("owner/name@revision, a folder, or a .gguf file",
                     "the model; nothing: the packaged SmolLM2-135M-Instruct")
    ] = msgspec.field(default="", name="STORYTELLER_MODEL")  # fmt: skip
    quantize: Annotated[Literal["int8", "none"], setting("int8 or none", "weights, keys and values")] = msgspec.field(
        default="int8", name="STORYTELLER_QUANTIZE"
    )
    batching: Annotated[
        Literal["continuous", "static", "single"],
        setting("continuous, static or single", "who is written together"),
    ] = msgspec.field(default="continuous", name="STORYTELLER_BATCHING")
    batch_size: Annotated[int, setting("a number from 1 to 1024", "most stories written at once", ge=1, le=1024)] = (
        msgspec.field(default=64, name="STORYTELLER_BATCH_SIZE")
    )
    batch_wait_ms: Annotated[
        float,
        setting("milliseconds from 0 to 10000", "static only: how long a batch waits to fill", ge=0, le=10_000),
    ] = msgspec.field(default=5, name="STORYTELLER_BATCH_WAIT_MS")
    kv_tokens: Annotated[
        int,
        setting(
            "a number of tokens, 0 to find out",
            "the KV cache's budget over all stories; 0: from the memory there is",
            ge=0,
        ),
    ] = msgspec.field(default=0, name="STORYTELLER_KV_TOKENS")
    max_tokens: Annotated[int, setting("a number from 1", "default and upper bound of an ask's max_tokens", ge=1)] = (
        msgspec.field(default=200, name="STORYTELLER_MAX_TOKENS")
    )
    threads: Annotated[
        int,
        setting("a number from 0 to 256", "threads that compute; 0: as many as there are cores", ge=0, le=256),
    ] = msgspec.field(default=0, name="STORYTELLER_THREADS")
    host: Annotated[str, setting("an address", "where metrics and probes bind")] = msgspec.field(
        default="127.0.0.1", name="STORYTELLER_HOST"
    )
    metrics_port: Port = msgspec.field(default=9102, name="STORYTELLER_METRICS_PORT")
    deadline_s: Annotated[float, setting("seconds above 0", "an ask not begun by then ends as expired", gt=0)] = (
        msgspec.field(default=60, name="STORYTELLER_DEADLINE_S")
    )
    cache: Annotated[str, setting("a folder", "where a converted model is kept")] = msgspec.field(
        default=".cache", name="STORYTELLER_CACHE"
    )

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))
