"""Who may enter by the game's door: hello, tokens, origins, handshakes, heartbeat."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from redis.asyncio import Redis
from websockets.exceptions import InvalidStatus

from gateway.config import Config
from gateway.game import Game
from gateway.stories import Stories
from gateway.strangers import MAX_ADDRESSES, Handshakes
from tests.bench.density import come
from tests.gateway.client import door, player
from tests.processes import Gateway, Stack, free_port, metric, wait_until

KEY = "a key that is long enough for HS256 and for HS512 too, with some to spare"


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"type": "hello", "protocol": 2}, 4502),
        ({"type": "hello"}, 4500),
        ({"type": "ask", "id": "a", "words": ["dragon"]}, 4500),
        ({"type": "hello", "protocol": 1, "player": ""}, 4500),
        ({"type": "hello", "protocol": 1, "player": "x" * 65}, 4500),
        ("", 4500),
        ("[" * 8000, 4500),
        (b"\x00\xff", 4500),
    ],
    ids=["another protocol", "no protocol", "an ask", "no name", "a long name", "nothing", "brackets", "bytes"],
)
async def test_a_first_frame_that_is_no_hello_of_this_protocol_closes(first: Any, code: int, gateway: Gateway) -> None:
    async with door(gateway.url) as client:
        await client.say(first)
        assert await client.closing() == code


@pytest.fixture(scope="module")
def guarded(running: Stack) -> Iterator[Gateway]:
    gateway = running.gateway(GATEWAY_AUTH_KEY=KEY, GATEWAY_ORIGINS="https://game.example, https://other.example")
    yield gateway
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.text()
    assert KEY not in gateway.text()


def unsigned(claims: dict[str, Any]) -> str:
    def part(data: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims)}."


NOW = int(time.time())


@pytest.mark.parametrize(
    "token",
    [
        None,
        "",
        "no.token.atall",
        "\u00fc.\u00fc.\u00fc",
        jwt.encode({"sub": "alice"}, "another key that is long enough for HS256", "HS256"),
        jwt.encode({"sub": "alice"}, KEY, "HS512"),
        jwt.encode({"sub": "alice", "exp": NOW - 60}, KEY, "HS256"),
        jwt.encode({"sub": "alice", "nbf": NOW + 3600}, KEY, "HS256"),
        jwt.encode({"player": "alice"}, KEY, "HS256"),
        jwt.encode({"sub": ""}, KEY, "HS256"),
        unsigned({"sub": "alice"}),
    ],
    ids=["none", "empty", "junk", "no ASCII", "another key", "another algorithm", "expired", "too early", "no sub",
         "an empty sub", "unsigned"],
)  # fmt: skip
async def test_without_a_good_token_nobody_enters(token: str | None, guarded: Gateway) -> None:
    async with door(guarded.url) as client:
        hello = {"type": "hello", "protocol": 1, "player": "alice"}
        error = await client.answer(hello if token is None else {**hello, "token": token})
        assert (error["type"], error["code"], error["temporary"]) == ("error", "unauthorized", False)
        assert KEY not in error["message"]
        assert await client.closing() == 4501


async def test_the_token_says_who_the_player_is(guarded: Gateway) -> None:
    token = jwt.encode({"sub": "alice", "exp": NOW + 3600}, KEY, "HS256")
    async with door(guarded.url) as client:
        welcome = await client.answer({"type": "hello", "protocol": 1, "player": "mallory", "token": token})
        assert (welcome["type"], welcome["player"]) == ("welcome", "alice")


async def test_only_pages_that_are_allowed_may_enter(gateway: Gateway, guarded: Gateway) -> None:
    async with door(gateway.url, origin=gateway.http):
        pass
    async with door(guarded.url, origin="https://other.example"):
        pass
    for url, headers in (
        (gateway.url, [("Origin", "https://evil.example")]),
        (gateway.url, [("Origin", "null")]),
        (gateway.url, [("Origin", f"http://evil.example:{gateway.http_port}")]),
        (gateway.url, [("Origin", gateway.http), ("Origin", gateway.http)]),
        (gateway.url, [("Origin", "http://[::1")]),
        (guarded.url, [("Origin", gateway.http)]),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with door(url, additional_headers=headers):
                pass
        assert refused.value.response.status_code == 403
    assert "Traceback" not in gateway.text()


async def test_junk_instead_of_a_handshake_gets_no_traceback_into_the_log(gateway: Gateway) -> None:
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"A" * 9_999,
        b"GET / HTTP/1.1\r\nHost: \xff\r\nOrigin: \xff\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: \xff\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ws_port)
        writer.write(junk)
        writer.write_eof()
        assert b" 500 " not in await asyncio.wait_for(reader.read(), 15)
        writer.close()
    assert "Traceback" not in gateway.text()
    async with player(gateway.url):
        pass


def test_an_address_has_a_burst_of_handshakes_and_then_a_rate() -> None:
    door = Handshakes(burst=5, rate=2)
    assert [door.allow("a", now=0) for _ in range(6)] == [True] * 5 + [False]
    assert door.allow("b", now=0)
    assert [door.allow("a", now=1) for _ in range(3)] == [True, True, False]
    assert [door.allow("a", now=100) for _ in range(6)] == [True] * 5 + [False]


def test_addresses_without_end_are_forgotten_the_silent_ones_first() -> None:
    door = Handshakes(burst=1, rate=0)
    assert all(door.allow(str(number), now=0) for number in range(MAX_ADDRESSES + 1))
    assert door.allow("0", now=0)
    assert not door.allow(str(MAX_ADDRESSES), now=0)


async def test_a_crowd_that_comes_back_at_once_from_one_address_is_let_in(gateway: Gateway) -> None:
    for _ in range(3):
        players = await come(gateway.url, 300, 300)
        assert len(players) == 300
        for transport in players:
            transport.abort()
    await asyncio.to_thread(
        wait_until, lambda: metric(gateway.metrics(), "gateway_connections") == 0, "an honest count", 20
    )
    assert "Traceback" not in gateway.text()


async def test_a_client_that_answers_no_ping_is_closed() -> None:
    """A gateway's door in this process, with a quick heart and no Redis behind it."""
    config = Config(ws_port=free_port())
    redis = Redis()
    stories = Stories(redis, redis, queue_limit=1, player_limit=1, grace_s=1)
    game = Game(config, stories, heartbeat_s=0.3)
    await game.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", config.ws_port)
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    hello = b'{"type":"hello","protocol":1}'
    writer.write(bytes((0x81, 0x80 | len(hello), 0, 0, 0, 0)) + hello)
    heard = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
    assert b"\x89" in heard
    assert b"\x88" in heard
    assert (4002).to_bytes(2, "big") in heard
    async with player(f"ws://127.0.0.1:{config.ws_port}") as client:  # this library answers pings
        assert (await client.answer("{"))["code"] == "bad_request"
        closing = asyncio.create_task(game.drain(1))
        assert (await client.hear())["type"] == "reconnect"
        assert await client.closing() == 4000
        await closing
    writer.close()
    await redis.aclose()
