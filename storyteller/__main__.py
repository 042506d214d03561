"""python -m storyteller: one storyteller, from its settings to its last word.

The composition root: the only place that knows signals, exit codes, and how the rooms are put together.
Life: settings → probes → model → Redis → write stories → drain → hand back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging.config
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from storyteller import metrics, wire
from storyteller.cache import Blocks, default_num_tokens
from storyteller.config import Config
from storyteller.desk import Desk
from storyteller.engine import Engine, Report
from storyteller.inbox import Inbox
from storyteller.outbox import Outbox
from storyteller.probes import serve_probes
from storyteller.prompts import Prompter, read_voices
from storyteller.scheduler import Scheduler
from storyteller.story import BLOCK
from storyteller.teller import Teller
from storyteller.text import detokenizer_for

if TYPE_CHECKING:
    from storyteller.model import Model

log = logging.getLogger("storyteller")

STEP_TOKENS = 192
"""Tokens of one step: a full batch, and the rest for the prompts of newcomers."""
DRAIN_S = 15
"""How long running stories may go on after SIGTERM where no other storyteller could take them."""


NOTE = "--prepare converts the model and compiles what must be compiled, so that later starts are quick, and exits."


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(wire.settings_help("python -m storyteller [--prepare]", Config, NOTE))
        return 0
    if words not in ([], ["--prepare"]):
        sys.stderr.write(f"storyteller: expected --help, --prepare or nothing, got {' '.join(words)}\n")
        return 2
    try:
        config = wire.read_settings(Config, os.environ)
    except wire.SettingsError as error:
        sys.stderr.write(f"storyteller: {error}\n")
        return 2
    logging.config.dictConfig(wire.log_config(sys.stderr.isatty()))
    if words:
        return 0 if load(config) else 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Service(config).run())


def load(config: Config) -> tuple[Model, int] | None:
    """The model, ready to step, and its blocks of KV memory; `None`, with a line in the log, where it cannot be had."""
    from storyteller.model import (  # importing torch takes seconds; settings are checked before
        Model,
        ModelError,
    )

    start = time.monotonic()
    log.info("loading the model: %s", config.model or "the packaged one")
    try:
        model = Model.load(config.model, config.quantize, config.num_threads, Path(config.cache), log.info)
    except ModelError as error:
        log.error("STORYTELLER_MODEL=%s: %s", config.model, error)
        return None
    num_tokens = config.kv_tokens or default_num_tokens(
        model.kv_bytes_per_token, model.window, config.batch_size, config.max_tokens
    )
    num_blocks = max(1, num_tokens // BLOCK)
    model.allocate(num_blocks)
    model.warm_up()
    log.info("model %s is ready after %.1f s", model.name, time.monotonic() - start)
    return model, num_blocks


class Service:
    """One storyteller's life. `state` says for /readyz what it is waiting for, '' while it serves."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = "loading the model"
        self.teller: Teller | None = None
        self.stopping = asyncio.Event()

    def unready(self) -> str:
        teller = self.teller
        if self.state or teller is None:
            return self.state
        now = time.monotonic()
        if now - teller.beat_at > wire.PRESENCE_S:
            return "Redis does not answer"
        if now - teller.engine.progress_at > wire.PRESENCE_S:
            return "no step was made for too long"
        return ""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stopping.set)
        async with contextlib.AsyncExitStack() as stack:
            try:
                stack.callback(serve_probes(self.config.host, self.config.metrics_port, self.unready))
            except OSError as error:
                log.error("STORYTELLER_METRICS_PORT=%d: expected a free port (%s)", self.config.metrics_port, error)
                return 1
            # Signals are heard while the model loads; the thread is left behind where they come then.
            loading = asyncio.create_task(asyncio.to_thread(load, self.config))
            stopped = asyncio.create_task(self.stopping.wait())
            await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                log.info("stopped while loading")
                os._exit(0)
            loaded = loading.result()
            if loaded is None:
                return 2
            await self.serve(*loaded, stack)
        return 0

    async def serve(self, model: Model, num_blocks: int, stack: contextlib.AsyncExitStack) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        redis = await stack.enter_async_context(connect(config.redis_url, timeout_s=5))
        blocking = await stack.enter_async_context(connect(config.redis_url, timeout_s=5))
        prompter = Prompter(model.tokenizer, read_voices())
        blocks = Blocks(num_blocks)
        desk = Desk(config, model, prompter, detokenizer_for(model.tokenizer), num_blocks)
        name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        inbox = Inbox(redis, blocking, name, config.deadline_s)
        teller = Teller(config, desk, inbox, Outbox(redis))
        scheduler = Scheduler(config.batching, config.batch_size, blocks, STEP_TOKENS)

        def report(step: Report) -> None:
            loop.call_soon_threadsafe(teller.report, step)

        teller.engine = Engine(
            model,
            scheduler,
            report,
            config.batch_wait_ms / 1000,
        )
        teller.engine.read_ahead([prompt for prompt in prompter.beginnings() if len(prompt) < model.window])
        metrics.kv_tokens.labels("budget").set(blocks.num_blocks * BLOCK)
        metrics.info.labels(model.name, model.revision, config.batching, config.quantize).set(1)

        writing = asyncio.create_task(asyncio.to_thread(teller.engine.run))
        telling = asyncio.create_task(teller.run())
        stopped = asyncio.create_task(self.stopping.wait())
        self.teller, self.state = teller, ""
        log.info("%s serves %s from %s", name, model.name, redacted(config.redis_url))
        await asyncio.wait((writing, telling, stopped), return_when=asyncio.FIRST_COMPLETED)
        self.state = "draining"
        started = time.monotonic()
        num_left = await self.leave(teller, writing, telling)
        for task in (writing, telling):
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        stopped.cancel()
        log.info("drained in %.1f s, %d stories handed back", time.monotonic() - started, num_left)

    async def leave(self, teller: Teller, writing: asyncio.Task[None], telling: asyncio.Task[None]) -> int:
        """The order matters: no more asks, then no more steps, then the last words, then the lease.

        After an error nothing is handed back: it goes on elsewhere after the lease, and whatever was aboard is blamed,
        so that an ask which is the cause ends as a dead letter instead of wandering for ever.
        """
        has_failed = writing.done() or telling.done()
        num_left = 0 if has_failed else await teller.drain(DRAIN_S)
        teller.engine.stop()
        await asyncio.wait((writing,), timeout=5)
        telling.cancel()
        await asyncio.wait((telling,), timeout=5)
        if has_failed:
            return 0
        try:
            await asyncio.wait_for(teller.hand_back(), timeout=3)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("left without a word to Redis (%s); others go on after the lease", error or "it is too slow")
        return num_left


def connect(url: str, timeout_s: float) -> Redis:
    """A client that never repeats a call by itself: what may be repeated, and when, is known one floor up."""
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=3,
        retry=Retry(NoBackoff(), 0),
    )


def redacted(url: str) -> str:
    return url.rsplit("@", 1)[-1]


if __name__ == "__main__":
    sys.exit(main())
