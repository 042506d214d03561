"""A client that takes nothing is cut off after ten seconds, costs little until then, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import psutil

from tests.gateway.client import FOR_EVER, player
from tests.processes import Gateway, metric, wait_until


def frame_of(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    length = bytes((0x80 | len(text),)) if len(text) < 126 else b"\xfe" + len(text).to_bytes(2, "big")
    return b"\x81" + length + b"\0\0\0\0" + text


async def test_a_client_that_stops_reading_is_cut_off_and_harms_nobody(gateway: Gateway) -> None:
    before = metric(gateway.metrics(), "gateway_slow_clients_total")
    async with player(gateway.url, "teller") as teller, player(gateway.url, "reader") as reader:
        story = (await teller.ask("a", **FOR_EVER))["story"]
        memory = psutil.Process(gateway.process.pid).memory_info().rss
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", gateway.ws_port))
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + key)
        deaf.sendall(frame_of({"type": "hello", "protocol": 1}))
        for number in range(60):  # so many that no buffer of the system takes them all
            deaf.sendall(frame_of({"type": "listen", "id": f"l{number}", "story": story}))
        started = time.monotonic()
        await reader.say({"type": "listen", "id": "r", "story": story})
        gaps, heard_at = [], time.monotonic()
        while metric(gateway.metrics(), "gateway_slow_clients_total") == before:
            await reader.until("text", "r")
            gaps.append(time.monotonic() - heard_at)
            heard_at = time.monotonic()
            assert heard_at - started < 30
        assert heard_at - started > 9
        assert max(gaps) < 3
        assert psutil.Process(gateway.process.pid).memory_info().rss - memory < 20 * 2**20
        await teller.say({"type": "cancel", "id": "a"})
        await teller.until("done", "a")
        done = await reader.until("done", "r")
        assert done["finish_reason"] == "cancelled"
        deaf.close()
    assert metric(gateway.metrics(), "gateway_closes_total", code="4001") >= 1
    await asyncio.to_thread(
        wait_until, lambda: metric(gateway.metrics(), "gateway_listeners") == 0, "an honest count of listeners", 10
    )
    assert "Traceback" not in gateway.text()
