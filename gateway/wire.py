"""The game protocol, version 1: every frame between a game client and a gateway, and its codec.

One JSON object a text frame. The game's door reads `ClientFrame` and writes `ServerFrame`; a Python client (the
loadbots are one) does it the other way round. `docs/protocol.md` describes the same frames for other languages.
Unknown fields are ignored in both directions, so that either side may be newer.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec

PROTOCOL = 1
MAX_FRAME = 8 * 1024
"""Bytes of the longest frame that a client may send."""
MAX_WORDS = 8
HELLO_TIMEOUT_S = 10

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=40, pattern=r"\S")]
FinishReason = Literal["stop", "length", "cancelled", "expired", "failed"]
ErrorCode = Literal[
    "bad_request", "too_long", "unauthorized", "forbidden", "rate_limited", "busy", "not_found", "failed"
]
ERROR_CODES: tuple[ErrorCode, ...] = (
    "bad_request", "too_long", "unauthorized", "forbidden", "rate_limited", "busy", "not_found", "failed",
)  # fmt: skip


class Close(IntEnum):
    """Close codes: up to 4499 a client should reconnect, from 4500 it should not."""

    GOING_AWAY = 1001
    TOO_BIG = 1009
    DRAINING = 4000
    TOO_SLOW = 4001
    HEARTBEAT = 4002
    NO_HELLO = 4500
    UNAUTHORIZED = 4501
    UNSUPPORTED_PROTOCOL = 4502


class Hello(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="hello"):
    protocol: int
    token: str | None = None
    player: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="ask"):
    id: Id
    words: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=MAX_WORDS)] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1, pattern=r"\S")] | None = None
    voice: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
        | Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=200)]], msgspec.Meta(max_length=4)]
        | None
    ) = None
    priority: Literal["high", "normal"] = "normal"
    ignore_end: bool = False


class Cancel(msgspec.Struct, frozen=True, tag_field="type", tag="cancel"):
    id: Id


class Listen(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="listen"):
    id: Id
    story: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    after: str | None = None


ClientFrame = Hello | Ask | Cancel | Listen


class VoiceInfo(msgspec.Struct, frozen=True):
    name: str
    manner: str


class Limits(msgspec.Struct, frozen=True):
    """What a gateway lets a client do, told with `welcome`."""

    frame_bytes: int = MAX_FRAME
    words: int = MAX_WORDS
    unfinished_asks: int = 0
    max_tokens: int = 0
    voices: dict[str, VoiceInfo] = {}


class Welcome(msgspec.Struct, frozen=True, tag_field="type", tag="welcome"):
    protocol: int
    player: str
    limits: Limits


class Queued(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="queued"):
    id: str
    story: str
    position: int
    eta_ms: int
    opening: str | None = None


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    id: str
    story: str
    cursor: str
    text: str


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class Timing(msgspec.Struct, frozen=True):
    queue_ms: int
    first_text_ms: int
    total_ms: int


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="done"):
    id: str
    story: str
    cursor: str
    finish_reason: FinishReason
    usage: Usage
    seed: int
    timing: Timing
    message: str | None = None
    unknown_words: tuple[str, ...] = ()


class Error(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="error"):
    code: ErrorCode
    message: str
    temporary: bool
    id: str | None = None
    retry_after_ms: int | None = None


class Left(msgspec.Struct, frozen=True, tag_field="type", tag="left"):
    id: str
    story: str


class Reconnect(msgspec.Struct, frozen=True, tag_field="type", tag="reconnect"):
    in_ms: tuple[int, int]


ServerFrame = Welcome | Queued | Text | Done | Error | Left | Reconnect

_encoder = msgspec.json.Encoder()
_client_frames: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_server_frames: msgspec.json.Decoder[ServerFrame] = msgspec.json.Decoder(ServerFrame)


def encode(frame: ClientFrame | ServerFrame) -> str:
    return _encoder.encode(frame).decode()


def decode_client(frame: str | bytes) -> ClientFrame:
    """One frame from a client; `msgspec.DecodeError` where it is none (`explain` says why, in words)."""
    try:
        return _client_frames.decode(frame)
    except RecursionError:
        raise msgspec.DecodeError("expected JSON of reasonable depth, got brackets within brackets") from None


def decode_server(frame: str | bytes) -> ServerFrame:
    """One frame from a gateway; `msgspec.DecodeError` where it is none."""
    return _server_frames.decode(frame)


_CHOICES = {
    "type": "hello, ask, cancel or listen",
    "priority": "high or normal",
    "role": "system, developer, user or assistant",
}


def explain(error: msgspec.DecodeError, data: str | bytes) -> str:
    """What was expected and what came, for the one who sent `data`.

    msgspec leaves out what came where a bound is broken, and what was expected where a choice is none.
    """
    message, at_path, path = str(error).partition(" - at `$")
    if not isinstance(error, msgspec.ValidationError):
        return message if message.startswith("expected") else f"expected JSON, got something else: {message}"
    name = path.rstrip("`").lstrip(".")
    where = f"{name}: " if at_path and name else ""
    if message.startswith("Invalid") and (choices := _CHOICES.get(name.rpartition(".")[2])):
        message = f"expected {choices}"
    elif message == "Number out of range":
        message = "expected a number in range"
    elif missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        message = f"expected the field {missing[1]}, got none"
    message = message[0].lower() + message[1:].replace("`", "")
    if "got" not in message:
        message += f", got {_shown(data, name)}"
    return where + message


def _shown(data: str | bytes, path: str) -> str:
    """The value at a path of some JSON, cut to a readable length."""
    try:
        value: Any = msgspec.json.decode(data)
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[key]
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError):
        return "something else"
    return text if len(text) <= 60 else f"{text[:60]}…"
