"""`python -m loadbots`: the composition root, the only place that knows signals, stdout and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from loadbots.config import Config, WrongSettingError, read_config
from loadbots.connection import NonsenseError, RefusedError, close_code, explain, open_connection
from loadbots.measure import Plan, crew_for, measure
from loadbots.table import show
from loadbots.tally import Tally

FINE, BAD, WRONG = 0, 1, 2


class NoAnswerError(Exception):
    """There is nobody to send a crowd to; one line for a person."""


def main(arguments: list[str]) -> int:
    try:
        config = read_config(arguments, os.environ)
    except WrongSettingError as wrong:
        print(f"loadbots: {wrong}", file=sys.stderr)  # noqa: T201
        return WRONG
    try:
        rows = uvloop.run(run(config))
    except NoAnswerError as silent:
        print(f"loadbots: {silent}", file=sys.stderr)  # noqa: T201
        return BAD
    show(rows, sys.stdout)
    text = msgspec.json.encode(rows).decode()
    if config.out:
        Path(config.out).write_text(text + "\n")
    print(text, flush=True)  # noqa: T201
    return verdict(rows)


async def run(config: Config) -> list[dict[str, Any]]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await knock(config)
    rows: list[dict[str, Any]] = []
    for players in config.players or (1,):
        if stop.is_set():
            break
        plan, tally = Plan(players), Tally(config.slo)
        rows.append(await measure(config, plan, tally, crew_for(config, plan, tally), stop))
    return rows


async def knock(config: Config) -> None:
    """Whether there is a gateway at all, before a crowd is sent."""
    for url in config.url:
        try:
            connection = await open_connection(url, f"{config.run}-knock", config.auth_key)
            await connection.close()
        except ConnectionClosed as closed:
            reason = closed.rcvd.reason if closed.rcvd else ""
            raise NoAnswerError(f"{url} closed the hello with {close_code(closed)} {reason}".rstrip()) from None
        except (RefusedError, NonsenseError) as failed:
            raise NoAnswerError(f"{url}: {failed}") from None
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as failed:
            raise NoAnswerError(f"{url} does not answer: {explain(failed)}") from None


def verdict(rows: Sequence[dict[str, Any]]) -> int:
    for row in rows:
        through = sum(row["endings"].get(ending, 0) for ending in ("stop", "length", "cancelled"))
        if not through or row["broken_stories"] or row["lost_frames"] or row["repeated_frames"] or row["slo_missed"]:
            return BAD
    return FINE if rows else BAD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
