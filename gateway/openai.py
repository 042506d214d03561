"""OpenAI's shapes: what `/v1/completions` and `/v1/chat/completions` take, and what they answer.

Bytes in, a wish or an `ApiError` out; texts and an ending in, JSON out. Nothing here waits or connects.

What this model or this gateway cannot do is refused with a word, so that nobody takes one answer for another:
logprobs, several choices, tools, other formats than text, penalties other than `repetition_penalty`. Fields that
change nothing here (`store`, `metadata`, …) and fields that nobody knows are ignored. Beyond OpenAI's own there are
`top_k`, `min_p`, `repetition_penalty` and `ignore_end`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gateway.wire import explain
from gateway.wishes import Wish, settings_of
from storyteller import wire

STATUS = {
    "bad_request": 400, "unsupported_parameter": 400, "invalid_api_key": 401, "forbidden": 403, "not_found": 404,
    "model_not_found": 404, "too_long": 413, "rate_limited": 429, "failed": 500, "cancelled": 500, "busy": 503,
    "expired": 504,
}  # fmt: skip
"""HTTP's status for each code of an error."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "logit_bias": ({},), "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (), "use_beam_search": (False,),
}  # fmt: skip
"""Fields that ask for what there is not, and the values by which they ask for nothing; null always does."""


class ApiError(Exception):
    """An answer that is an error: OpenAI's error object under a status."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None, status: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status or STATUS[code]
        self.retry_after_s = retry_after_s
        named = re.match(r"([a-z_]+)[\w.\[\]]*: ", message)  # messages begin with the name of the field, if it is one
        self._param = param or (named[1] if named else None)

    @property
    def body(self) -> bytes:
        kind = "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else ""
        error = {
            "message": str(self),
            "type": kind or "invalid_request_error",
            "param": self._param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


class BrokenOffError(ApiError):
    """An answer that does not come although its ask was accepted."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have in common."""

    model: str | None = None
    user: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    seed: wire.Seed | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=4)] | None = None
    ignore_end: bool = False


class Completion(_Request, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]


Request = TypeVar("Request", bound=_Request)


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class ChatCompletion(_Request, frozen=True, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood."""

    wish: Wish
    model: str | None
    is_chat: bool
    is_stream: bool
    include_usage: bool


def read_completion(body: bytes) -> Asked:
    """`ApiError` where the body is none."""
    request = _read(Completion, body)
    prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[0]
    return _asked(request, wire.Raw(prompt), is_chat=False)


def read_chat(body: bytes) -> Asked:
    """`ApiError` where the body is none."""
    request = _read(ChatCompletion, body)
    messages = (
        wire.Message("system" if message.role == "developer" else message.role, _text(message, number))
        for number, message in enumerate(request.messages)
    )
    return _asked(request, wire.Chat(tuple(messages)), is_chat=True)


def _read(kind: type[Request], body: bytes) -> Request:
    try:
        raw = msgspec.json.decode(body)
        request = msgspec.convert(raw, kind)
    except msgspec.DecodeError as error:
        raise ApiError("bad_request", explain(error, body)) from None
    except RecursionError:
        raise ApiError("bad_request", "expected JSON of reasonable depth, got brackets within brackets") from None
    for name in HARMLESS.keys() & raw.keys():
        value = raw[name]
        if value is not None and not any(type(value) is type(same) and value == same for same in HARMLESS[name]):
            expected = " or ".join(msgspec.json.encode(same).decode() for same in (*HARMLESS[name], None))
            raise ApiError("unsupported_parameter", f"{name}: expected {expected}: there is no such thing here")
    if request.stream_options is not None and not request.stream:
        raise ApiError("bad_request", "stream_options: expected it only where stream is true")
    return request


def _text(message: Message, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            where = f"messages[{number}].content[{place}].type"
            raise ApiError("unsupported_parameter", f"{where}: expected text, got {part.type[:40]}", param="messages")
    return "".join(part.text or "" for part in message.content)


def _asked(request: _Request, prompt: wire.Prompt, *, is_chat: bool) -> Asked:
    if request.max_completion_tokens is not None:
        request = msgspec.structs.replace(request, max_tokens=request.max_completion_tokens)
    return Asked(
        Wish(prompt, settings_of(request), player=request.user or None, seed=request.seed),
        model=request.model,
        is_chat=is_chat,
        is_stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The shapes of one answer, whole or as the events of a stream."""

    story: str
    model: str
    fingerprint: str | None
    is_chat: bool
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, ending: wire.Ending) -> bytes:
        told = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        kind = "chat.completion" if self.is_chat else "text_completion"
        choice = self._choice(told, ending.finish_reason)
        return self._encode(kind, {"choices": [choice], "usage": _usage(ending), "seed": ending.seed})

    def begin(self) -> list[bytes]:
        """Events before the first text."""
        return [self._event([self._choice({"delta": {"role": "assistant", "content": ""}})])] if self.is_chat else []

    def text(self, text: str) -> bytes:
        return self._event([self._choice({"delta": {"content": text}} if self.is_chat else {"text": text})])

    def end(self, ending: wire.Ending) -> list[bytes]:
        """Events behind the last text."""
        nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        events = [self._event([self._choice(nothing, ending.finish_reason)])]
        if self.include_usage:
            events.append(self._event([], _usage(ending)))
        return events

    def _choice(self, told: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, **told, "logprobs": None, "finish_reason": reason}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._encode(kind, {"choices": choices, **({"usage": usage} if self.include_usage else {})})

    def _encode(self, kind: str, rest: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode(
            {
                "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.story}",
                "object": kind,
                "created": self.created,
                "model": self.model,
                "system_fingerprint": self.fingerprint,
                **rest,
            }
        )


def _usage(ending: wire.Ending) -> dict[str, int]:
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def model_card(house: wire.House, since: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {"id": house.model, "object": "model", "created": since, "owned_by": "campfire"}
