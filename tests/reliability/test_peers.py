"""Peers that take nothing, or are gone without a word: away within their deadlines, at the cost of nobody else."""

from __future__ import annotations

import asyncio
import socket as sockets
import time
from contextlib import suppress

import psutil
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from gateway import wire
from tests.processes import metric
from tests.reliability.conftest import Silent
from tests.reliability.crowd import Crowd, ask, check, player, receive
from tests.reliability.house import House
from tests.reliability.test_faults import Figure, until

SEND_S = 10
HEARTBEAT_S = 20


async def test_a_client_that_never_reads_is_gone_within_its_deadline_and_nobody_else_notices(
    small_stack: House, truth: dict[int, str], figure: Figure
) -> None:
    gateway = small_stack.gateways[0]
    async with player(gateway.url, "asker") as asker:
        await asker.send(wire.encode(ask(0, tokens=1000)))
        while not isinstance(done := await receive(asker), wire.Done):
            pass
    memory = psutil.Process(gateway.process.pid).memory_info().rss
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", gateway.ws_port))
    raw.setblocking(False)
    slow = await connect(gateway.url, sock=raw, compression=None, proxy=None, ping_interval=None, close_timeout=0.1)
    await slow.send(wire.encode(wire.Hello(wire.PROTOCOL)))
    await slow.recv()
    slow.transport.pause_reading()
    started = time.monotonic()

    async def listen_for_ever() -> None:
        with suppress(ConnectionClosed):
            for number in range(100_000):
                await slow.send(wire.encode(wire.Listen(f"l{number}", done.story)))

    def num_slow() -> float:
        return metric(gateway.metrics(), "gateway_slow_clients_total")

    before = num_slow()
    asking = asyncio.create_task(listen_for_ever())
    crowd = Crowd([gateway.url], range(8))
    async with crowd.playing():
        await until(lambda: num_slow() > before, "the end of the slow client", SEND_S + 15)
        took = time.monotonic() - started
    grown = psutil.Process(gateway.process.pid).memory_info().rss - memory
    asking.cancel()
    await asyncio.wait((asking,))
    slow.transport.abort()
    await check(crowd, truth)
    assert crowd.longest_silence_s < 2, "somebody else noticed"
    assert metric(gateway.metrics(), "gateway_closes_total", code="4001") >= 1
    assert grown < 32 * 1024 * 1024
    figure(
        f"gone after {took:.1f} s with {grown / 1024 / 1024:.1f} MiB more in the gateway; "
        f"longest silence of the others {crowd.longest_silence_s:.2f} s"
    )


async def test_a_connection_whose_other_end_is_gone_is_closed_by_the_heartbeat(silent: Silent, figure: Figure) -> None:
    """It was opened when the first test of this folder began, and has said nothing since."""
    most = 2 * HEARTBEAT_S + 10

    def num_closed() -> float:
        return metric(silent.gateway.metrics(), "gateway_closes_total", code="4002")

    await until(lambda: num_closed() == 1, "the heartbeat's verdict", most)
    assert metric(silent.gateway.metrics(), "gateway_connections") == 0
    assert silent.code_received() == wire.Close.HEARTBEAT
    figure(f"closed within {most} s")
