"""`python -m loadbots`: the composition root, the only place that knows signals, ports, files and exit codes.

On stdout: the table, what went wrong in words, and as the last line the rows as JSON. The live view is stderr's.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from loadbots.campaign import Campaign, Row, fine
from loadbots.config import Config, read_config
from loadbots.flags import WrongSettingError
from loadbots.metrics import Board, serve
from loadbots.players import NoAnswerError, knock
from loadbots.reconcile import NoMetricsError
from loadbots.results import UnreadableError, read_results
from loadbots.table import console, show
from loadbots.workers import WorkerLostError

FINE, BAD, WRONG, INTERRUPTED = 0, 1, 2, 130


def main(arguments: list[str]) -> int:
    try:
        config = read_config(arguments, os.environ)
        if config.compare:
            return compare(config)
    except (WrongSettingError, UnreadableError) as wrong:
        complain(wrong)
        return WRONG
    allow_sockets()
    try:
        campaign = uvloop.run(run(config))
    except (NoAnswerError, NoMetricsError, WorkerLostError) as failed:
        complain(failed)
        return BAD
    except KeyboardInterrupt:
        complain("interrupted twice: nothing is reported")
        return INTERRUPTED
    show(campaign.rows, sys.stdout)
    if campaign.knee:
        console(sys.stdout).print(str(campaign.knee))
    well = write(config, campaign.rows)
    print(msgspec.json.encode(campaign.rows).decode(), flush=True)  # noqa: T201
    return FINE if well and fine(campaign.rows, campaign.knee) else BAD


async def run(config: Config) -> Campaign:
    """All crowds; SIGINT and SIGTERM end the one that is under way, and what was heard is reported. A second signal
    does what it does to any program."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end_early() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end_early)
    board = Board()
    stop_serving = open_metrics(config, board)
    try:
        campaign = Campaign(await knock(config), board, stop)
        await campaign.run()
        return campaign
    finally:
        stop_serving()


def allow_sockets() -> None:
    """As many open sockets as the system lets this process, and its children, have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_metrics(config: Config, board: Board) -> Callable[[], None]:
    """The metrics' port. A second run beside this one may have it: that is worth a line, not the run."""
    if not config.metrics_port:
        return lambda: None
    try:
        return serve(board, config.metrics_host, config.metrics_port)
    except OSError as taken:
        complain(f"no metrics: port {config.metrics_port} (LOADBOTS_METRICS_PORT): {taken.strerror}")
        return lambda: None


def compare(config: Config) -> int:
    rows = read_results(config.compare)
    show(rows, sys.stdout)
    well = write(config, rows)
    print(msgspec.json.encode(rows).decode(), flush=True)  # noqa: T201
    return FINE if well else BAD


def write(config: Config, rows: list[Row]) -> bool:
    """The files that were asked for; whether they could be written."""
    try:
        if config.out:
            Path(config.out).write_bytes(msgspec.json.encode(rows) + b"\n")
        if config.report:
            from loadbots.report import page  # plotly is large: imported by those who want a report

            Path(config.report).write_text(page(rows), encoding="utf-8")
    except OSError as failed:
        complain(f"{failed.filename}: cannot be written: {failed.strerror}")
        return False
    return True


def complain(line: object) -> None:
    print(f"loadbots: {line}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
