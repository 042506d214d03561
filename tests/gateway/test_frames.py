"""Whatever a client sends after hello, the worst that happens is an error frame."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.gateway.client import FOR_EVER, Client, player
from tests.processes import Gateway, Storyteller, metric, wait_until


async def lives_on(client: Client) -> None:
    """It still gets a story."""
    assert (await client.ask("alive", max_tokens=1))["type"] == "queued"
    assert (await client.until("done", "alive"))["finish_reason"] in ("stop", "length")


ASK = '{"type":"ask","id":"a","words":["dragon"]'


@pytest.mark.parametrize(
    ("frame", "frame_id", "words"),
    [
        ("", None, "expected JSON, got"),
        ("{", None, "expected JSON, got"),
        ("null", None, "expected object, got null"),
        ('"ask"', None, "expected object, got str"),
        ("[" * 8000, None, "expected"),
        ('{"type":"ask","id":"a","x":' + "[" * 8000, None, "expected JSON of reasonable depth, got brackets"),
        (b"\x00\x01", None, "expected a text frame, got a binary one"),
        ({"type": "tell", "id": "a"}, "a", 'type: expected hello, ask, cancel or listen, got "tell"'),
        ({"id": "a"}, "a", "expected the field type, got none"),
        ({"type": "hello", "protocol": 1}, None, "expected ask, cancel or listen, got a second hello"),
        ({"type": "ask", "words": ["dragon"]}, None, "expected the field id, got none"),
        ({"type": "ask", "id": "", "words": ["dragon"]}, "", "id: expected str of length >= 1"),
        ({"type": "ask", "id": 7, "words": ["dragon"]}, None, "id: expected str, got int"),
        ({"type": "ask", "id": "x" * 65, "words": ["dragon"]}, None, "id: expected str of length <= 64"),
        ({"type": "ask", "id": "a"}, "a", "expected either words or prompt, got both or neither"),
        ({"type": "ask", "id": "a", "words": ["dragon"], "prompt": "x"}, "a", "expected either words or prompt"),
        ({"type": "ask", "id": "a", "words": []}, "a", "words: expected array of length >= 1, got []"),
        ({"type": "ask", "id": "a", "words": ["a"] * 9}, "a", "words: expected array of length <= 8"),
        ({"type": "ask", "id": "a", "words": "dragon"}, "a", "words: expected array | null, got str"),
        ({"type": "ask", "id": "a", "words": ["dragon", None]}, "a", "words[1]: expected str, got null"),
        ({"type": "ask", "id": "a", "words": [" "]}, "a", "words[0]: expected str matching"),
        ({"type": "ask", "id": "a", "prompt": ""}, "a", "prompt: expected str of length >= 1"),
        ({"type": "ask", "id": "a", "words": ["dragon"], "voice": "nobody"}, "a", "voice: expected one of"),
        (ASK + ',"temperature":NaN}', None, "expected JSON, got"),
        (ASK + ',"temperature":1e999}', "a", "temperature: expected a number in range"),
        (ASK + ',"temperature":2.5}', "a", "temperature: expected float <= 2.0, got 2.5"),
        (ASK + ',"max_tokens":0}', "a", "max_tokens: expected int >= 1, got 0"),
        (ASK + ',"seed":9223372036854775808}', "a", "seed: expected int <= 9223372036854775807, got"),
        (ASK + ',"priority":"urgent"}', "a", 'priority: expected high or normal, got "urgent"'),
        (ASK + ',"stop":["a","b","c","d","e"]}', "a", "stop: expected array of length <= 4"),
        ('{"type":"ask","id":"a","words":["\\ud800"]}', None, "expected JSON, got"),
        ('{"type":"ask","id":"a","words":["a\x01"]}', None, "expected JSON, got"),
        ({"type": "cancel", "id": "nothing"}, "nothing", "id: expected one that is in use, got 'nothing'"),
        ({"type": "listen", "id": "l"}, "l", "expected the field story, got none"),
        ({"type": "listen", "id": "l", "story": "x", "after": "1.00000000"}, "l", "after: expected a cursor"),
        ({"type": "listen", "id": "l", "story": "x", "after": "\u0661.00000000"}, "l", "after: expected a cursor"),
    ],
)  # fmt: skip
async def test_a_frame_that_is_none_is_told_why_and_the_connection_lives_on(
    frame: Any, frame_id: str | None, words: str, gateway: Gateway
) -> None:
    async with player(gateway.url) as client:
        error = await client.answer(frame)
        assert (error["type"], error["code"]) == ("error", "not_found" if "in use" in words else "bad_request")
        assert error.get("id") == frame_id
        assert error["message"].startswith(words), error
        await lives_on(client)


async def test_a_frame_may_have_8_kib_and_no_byte_more(gateway: Gateway) -> None:
    async with player(gateway.url) as client:
        frame = ASK + ',"max_tokens":1,"pad":"'
        await client.say(frame + "x" * (8192 - len(frame) - 2) + '"}')
        await client.until("done", "a")
        await client.say(frame + "x" * (8192 - len(frame) - 1) + '"}')
        assert await client.closing() == 1009


async def test_an_id_is_free_again_after_its_ending_and_not_before(gateway: Gateway) -> None:
    async with player(gateway.url) as client, player(gateway.url) as other:
        queued = await client.ask("a", **FOR_EVER)
        assert queued["type"] == "queued"
        assert (await client.ask("a"))["code"] == "bad_request"
        assert (await client.answer({"type": "listen", "id": "a", "story": queued["story"]}))["type"] in (
            "text",
            "error",
        )
        assert (await other.ask("a", max_tokens=1))["type"] == "queued"  # an id is its connection's own
        await client.say({"type": "cancel", "id": "a"})
        assert (await client.until("done", "a"))["finish_reason"] == "cancelled"
        await client.say({"type": "cancel", "id": "a"})
        assert (await client.until("error", "a"))["code"] == "not_found"
        assert (await client.ask("a", max_tokens=1))["type"] == "queued"
        await client.until("done", "a")
        await other.until("done", "a")


async def test_of_64_asks_at_once_each_gets_one_answer_and_the_limit_holds(gateway: Gateway) -> None:
    async with player(gateway.url) as client:
        for number in range(64):
            await client.say({"type": "ask", "id": f"a{number}", "words": ["dragon"], **FOR_EVER})
        answers: dict[str, str] = {}
        while len(answers) < 64:
            frame = await client.hear()
            if frame["type"] == "error":
                assert frame["temporary"]
                assert frame["retry_after_ms"] > 0
            if frame["type"] in ("queued", "error"):
                answers.setdefault(frame["id"], frame.get("code", "queued"))
        assert sorted(answers.values()) == ["queued"] * 2 + ["rate_limited"] * 62
        for frame_id, answer in answers.items():
            if answer == "queued":
                await client.say({"type": "cancel", "id": frame_id})
                await client.until("done", frame_id)
        await lives_on(client)


async def test_listenings_of_a_connection_are_bounded(gateway: Gateway) -> None:
    async with player(gateway.url) as client, player(gateway.url) as other:
        story = (await client.ask("a", **FOR_EVER))["story"]
        for number in range(65):
            await other.say({"type": "listen", "id": f"l{number}", "story": story})
        refused = await other.until("error")
        assert (refused["id"], refused["code"]) == ("l64", "rate_limited")
        await client.say({"type": "cancel", "id": "a"})
        assert {(await other.until("done"))["id"] for _ in range(64)} == {f"l{number}" for number in range(64)}


async def test_a_connection_that_breaks_in_the_middle_harms_nobody(gateway: Gateway, storyteller: Storyteller) -> None:
    async with player(gateway.url) as watcher:
        for cut in (1, 10, 40):
            async with player(gateway.url) as client:
                queued = await client.ask("a", max_tokens=200, ignore_end=True)
                frame = ASK.encode()
                client.socket.transport.write(bytes((0x81, 0x80 | len(frame), 0, 0, 0, 0)) + frame[:cut])
                client.socket.transport.abort()
            listening = await watcher.answer({"type": "listen", "id": f"l{cut}", "story": queued["story"]})
            assert listening["type"] in ("queued", "text", "done")
            if listening["type"] != "done":
                assert (await watcher.until("done", f"l{cut}"))["usage"]["completion_tokens"] == 200
    await asyncio.to_thread(
        wait_until, lambda: metric(gateway.metrics(), "gateway_connections") == 0, "an honest count", 10
    )
    assert "Traceback" not in gateway.text()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=12)
    | st.sampled_from([0, 1, -1, 2**63 - 1, 2**63, 10**40, 1e308, "", "\x00", "x" * 70, "0.00000000", [], {}]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = (
    "id", "words", "prompt", "voice", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop",
    "priority", "ignore_end", "story", "after", "protocol", "token",
)  # fmt: skip
FRAMES = st.fixed_dictionaries(
    {"type": st.sampled_from(["ask", "ask", "cancel", "listen", "hello", "tell", ""]), "max_tokens": st.integers(1, 3)},
    optional={**dict.fromkeys(NAMES, VALUES), "id": st.sampled_from(["a", "b", "c"]) | VALUES},
)


async def play(gateway: Gateway, frames: list[dict[str, Any]], cut: int) -> None:
    async with player(gateway.url) as client:
        for number, frame in enumerate(frames):
            text = json.dumps(frame)
            await client.say(text[:cut] if number == len(frames) - 1 else text)
            if cut % 5 == 0:
                await client.say(text.encode())
        await client.say({"type": "ask", "id": "last", "words": ["dragon"], "max_tokens": 1})
        while (frame := await client.hear()).get("id") != "last" or frame["type"] == "error":
            assert frame["type"] in ("queued", "text", "done", "error", "left")
            if frame["type"] == "error" and frame.get("id") == "last":
                assert frame["code"] == "rate_limited"
                await client.say({"type": "ask", "id": "last", "words": ["dragon"], "max_tokens": 1})
        await client.until("done", "last")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(FRAMES, min_size=1, max_size=6), cut=st.integers(0, 300))
def test_whatever_is_sent_the_connection_lives_on(frames: list[dict[str, Any]], cut: int, gateway: Gateway) -> None:
    try:
        asyncio.run(play(gateway, frames, cut))
    except ConnectionClosed as closed:
        raise AssertionError(f"closed by {closed.rcvd} after {frames}") from None
    assert "Traceback" not in gateway.text()
