"""What is asked of a stranger before anything is done for them: where they come from, and how often.

Both doors use it. It also keeps out of the log what strangers do wrong on the wire: that is no error of ours, and
whoever likes could fill the log with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.config import Config

BURST = 10_000
"""Handshakes that one address may make at once: all players behind it, reconnecting in the same moment."""
RATE = 200.0
"""Handshakes a second that one address may make for ever."""
MAX_ADDRESSES = 10_000
BUFFERED_BYTES = 16 * 1024
"""What may wait in this process for a peer before its writer waits."""
UNSENT_BYTES = 32 * 1024
"""What the system may hold for a peer that takes nothing; it would be megabytes otherwise."""
SILENCE_MS = 15_000
"""A peer that acknowledges nothing, or takes nothing, for so long is cut off by the system, whatever waits here."""


class Origins:
    """Which pages may use this gateway from a browser. Browsers always send an Origin header, others need not."""

    def __init__(self, config: Config) -> None:
        self._allowed = config.allowed_origins
        self._http_port = config.http_port

    def allow(self, origin: str | None, host: str) -> bool:
        if origin is None:
            return True
        return origin in self._allowed if self._allowed else self._is_own(origin, host)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether an origin is that of the page on this gateway's HTTP port."""
        try:
            parts, here = urlsplit(origin), urlsplit(f"//{host}")
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
            return parts.hostname is not None and parts.hostname == here.hostname and port == self._http_port
        except ValueError:
            return False


class Handshakes:
    """A token bucket for every address of late; at most `MAX_ADDRESSES` of them, the longest silent one goes first."""

    def __init__(self, burst: float = BURST, rate: float = RATE) -> None:
        self._burst = burst
        self._rate = rate
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> tokens, when

    def allow(self, address: str, now: float | None = None) -> bool:
        """Takes one token, if there is one."""
        now = time.monotonic() if now is None else now
        tokens, since = self._buckets.pop(address, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        is_allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if is_allowed else tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return is_allowed


def bound(transport: asyncio.Transport | None) -> None:
    """Bounds what is kept for a peer that takes nothing, here and by the system, and for how long.

    The system's deadline is the second net under our own ones: what is left in a buffer after a close has no other.
    """
    if transport is None:
        return
    connection = transport.get_extra_info("socket")
    transport.set_write_buffer_limits(high=BUFFERED_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether aiohttp's log line tells of an error of ours, not of a stranger's broken request."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def keep_out_of_log() -> None:
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
