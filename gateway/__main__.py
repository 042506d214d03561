"""python -m gateway: one gateway, from its settings to its last connection.

The composition root: the only place that knows signals, exit codes, and how the rooms are put together.
Life: settings → metrics → Redis → doors → serve → drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging.config
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import uvloop
from prometheus_client import start_http_server
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway import metrics
from gateway.api import Api
from gateway.config import Config
from gateway.game import Game
from gateway.stories import Stories
from storyteller import wire

log = logging.getLogger("gateway")

DRAIN_S = 20
"""How long running stories may be told to their end after SIGTERM."""


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(wire.settings_help("python -m gateway", Config))
        return 0
    if words:
        sys.stderr.write(f"gateway: expected --help or nothing, got {' '.join(words)}\n")
        return 2
    try:
        config = wire.read_settings(Config, os.environ)
    except wire.SettingsError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    logging.config.dictConfig(wire.log_config(sys.stderr.isatty()))
    logging.captureWarnings(True)  # such as that of a short GATEWAY_AUTH_KEY: a line of the log like any other
    # A connection is a file descriptor: as many as the system lets us have.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(config))


async def run(config: Config) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(config.redis_url, timeout_s=3))
        blocking = await stack.enter_async_context(connect(config.redis_url, timeout_s=4))
        stories = Stories(
            redis,
            blocking,
            queue_limit=config.queue_limit,
            player_limit=config.player_limit,
            grace_s=config.grace_s,
        )
        game = Game(config, stories)
        api = Api(config, stories)
        doors: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("GATEWAY_METRICS_PORT", config.metrics_port, partial(serve_metrics, config, stack)),
            ("GATEWAY_WS_PORT", config.ws_port, game.start),
            ("GATEWAY_HTTP_PORT", config.http_port, api.start),
        ]
        for variable, port, start in doors:
            try:
                await start()
            except OSError as error:
                log.error("%s=%d: expected a free port (%s)", variable, port, error)
                return 1
        log.info("listening: game ws://%s:%d, page and API http://%s:%d, Redis at %s",
                 config.host, config.ws_port, config.host, config.http_port,
                 config.redis_url.rsplit("@", 1)[-1])  # fmt: skip
        reading = asyncio.create_task(stories.run())
        lag = asyncio.create_task(measure_lag())
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait((reading, lag, stopped), return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not reading.cancelled():
            log.error("reading stories failed", exc_info=reading.exception())
        started = time.monotonic()
        api.is_draining = True
        await asyncio.gather(game.drain(DRAIN_S), api.drain(DRAIN_S))
        for task in (reading, lag, stopped):
            if task.done() and not task.cancelled() and (failure := task.exception()):
                raise failure
            task.cancel()
        await asyncio.gather(reading, lag, stopped, return_exceptions=True)
        log.info("drained in %.1f s", time.monotonic() - started)
    return 0


async def serve_metrics(config: Config, stack: contextlib.AsyncExitStack) -> None:
    server, thread = start_http_server(config.metrics_port, config.host)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    stack.callback(close)


async def measure_lag() -> None:
    """How late a timer runs: what every listener waits longer, while something keeps the event loop."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.5)
        metrics.event_loop_lag.set(time.monotonic() - before - 0.5)


def connect(url: str, timeout_s: float) -> Redis:
    """A client that never repeats a call by itself: what may be repeated, and when, is known one floor up."""
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=3,
        retry=Retry(NoBackoff(), 0),
    )


if __name__ == "__main__":
    sys.exit(main())
