"""Clients that read nothing, write nothing, or write anything: nobody else notices, and the log stays clean."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import LONG
from tests.processes import Gateway, Stack, Storyteller, fetch, metric, wait_until


def connect(gateway: Gateway) -> socket.socket:
    """A client that takes next to nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", gateway.http_port))
    return client


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


def test_clients_that_read_or_write_nothing_are_cut_off_and_hold_nothing(
    running: Stack, storyteller: Storyteller
) -> None:
    gateway = running.gateway()
    wait_until(gateway.is_ready, "a ready gateway")
    long = {"prompt": "Once", "stream": True, "max_tokens": LONG["max_tokens"], **LONG["extra_body"]}
    started = time.monotonic()
    with connect(gateway) as deaf, connect(gateway) as flooding, connect(gateway) as mute:
        deaf.sendall(request("/v1/completions", json.dumps(long).encode()))
        flooding.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        mute.sendall(request("/v1/completions", b'{"prompt":', length=1000))
        wait_until(lambda: metric(gateway.metrics(), "gateway_slow_clients_total") >= 1, "a slow client", 20)
        assert time.monotonic() - started > 9
        wait_until(
            lambda: metric(gateway.metrics(), "gateway_stories_total", finish_reason="cancelled") == 1,
            "the end of a story that nobody takes",
            40,
        )
        wait_until(lambda: metric(storyteller.metrics(), "storyteller_batch_size") == 0, "a free place", 10)
        assert b"408" in mute.recv(64)
        assert fetch(f"{gateway.http}/livez")[0] == 200
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.text()


def test_junk_on_the_wire_gets_no_traceback_into_the_log(gateway: Gateway) -> None:
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 20_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /%ff%00 HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET /page/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=5) as client:
            client.sendall(junk)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(4096)
            assert b" 500 " not in answer, junk
            assert b"root:" not in answer
    assert fetch(f"{gateway.http}/livez")[0] == 200
    assert "Traceback" not in gateway.text()


TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates too
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, "", "\x00", "x" * 300])
    | st.floats()
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = (
    "model", "user", "stream", "stream_options", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_end", "n", "logprobs", "tools", "logit_bias",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", ""]),
            "content": TEXT | VALUES,
        }
    ),
    max_size=4,
)
BODIES = st.fixed_dictionaries(
    {"prompt": TEXT | VALUES, "messages": MESSAGES, "max_tokens": st.integers(1, 3)},
    optional=dict.fromkeys(NAMES, VALUES),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=BODIES, cut=st.integers(0, 400))
def test_whatever_is_asked_nothing_breaks(path: str, body: dict[str, Any], cut: int, gateway: Gateway) -> None:
    """Cut in the middle now and then; NaN, infinities and lone surrogates among the values."""
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=20)
    connection.request("POST", path, data[:cut] if cut % 3 == 0 else data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status in (200, 400, 404, 413), text
    if answer.status != 200:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in gateway.text()
