"""A player at an OpenAI-compatible door: the same crowd, the same record, another protocol.

Stories come as server-sent events; tokens are taken from `usage`. A stream cannot be resumed, so a connection that
breaks inside a story ends it as `connection`. To cancel is to hang up: then nobody tells the tokens. That the same
seed gives the same text is our promise, not every server's: such a difference is not counted as broken here.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp
import msgspec

from loadbots.asks import Wish
from loadbots.bot import TRY_AGAIN_S
from loadbots.chaos import STALL_S, Fate
from loadbots.config import Config
from loadbots.told import Amendment, Phase, Telling, Told

CONNECT_S = 10.0
END_FLAGS = (("ignore_eos", "ignore_end"), ("ignore_end",), ("ignore_eos",))
"""What servers call "exactly max_tokens": vLLM and llama.cpp the one, this storyteller the other."""
TRY_AGAIN = {429: "rate_limited", 503: "busy"}
BAD_REQUEST = (400, 422)


class NoServerError(Exception):
    """One line for a person."""


class BadStreamError(Exception):
    """Something that is no chunk of a completion."""


class Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] = {}
    finish_reason: str | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Fault(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class Chunk(msgspec.Struct):
    id: str = ""
    choices: list[Choice] = []
    usage: ChunkUsage | None = None
    error: Fault | None = None


_chunks = msgspec.json.Decoder(Chunk)


def headers(config: Config) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}


def body(config: Config, wish: Wish, player: str) -> dict[str, Any]:
    """A completion request that asks for the words of `wish`."""
    asked = f"Tell a short story with these words: {', '.join(wish.words)}."
    what: dict[str, Any] = (
        {"messages": [{"role": "user", "content": asked}]}
        if config.endpoint == "chat"
        else {"prompt": f"{asked}\n\nOnce upon a time"}
    )
    what |= {"model": config.model, "max_tokens": config.max_tokens, "seed": wish.seed % 2**31, "user": player}
    what |= {"stream": True, "stream_options": {"include_usage": True}}
    optional = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    what |= {name: value for name, value in optional.items() if value is not None}
    return what | dict.fromkeys(config.end_flags, True)


def path(config: Config) -> str:
    return f"{config.openai}/{'chat/completions' if config.endpoint == 'chat' else 'completions'}"


async def learn(config: Config) -> Config:
    """Whether the server answers, its first model's name, and what it calls `--ignore-end`."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_S + config.silence, connect=CONNECT_S)
    try:
        async with aiohttp.ClientSession(headers=headers(config), timeout=timeout) as session:
            async with session.get(f"{config.openai}/models") as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise NoServerError(f"{config.openai}/models: expected 200, got {answer.status} {text[:120]}")
                model = config.model or msgspec.json.decode(text)["data"][0]["id"]
            config = msgspec.structs.replace(config, model=model)
            if config.ignore_end:
                config = await _learn_end_flags(session, config)
            return config
    except (aiohttp.ClientError, TimeoutError, OSError) as failed:
        raise NoServerError(f"{config.openai} does not answer: {failed or 'too late'}") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise NoServerError(f"{config.openai}/models: expected OpenAI's list of models, got {text[:80]!r}") from None


async def _learn_end_flags(session: aiohttp.ClientSession, config: Config) -> Config:
    """Try the names for `--ignore-end` on a story of one token; a server may refuse fields that it does not know."""
    for flags in END_FLAGS:
        trial = msgspec.structs.replace(config, end_flags=flags, max_tokens=1)
        async with session.post(path(config), json=body(trial, Wish(0, 0, ("dragon",), 0), config.run)) as answer:
            await answer.read()
            if answer.status not in BAD_REQUEST:
                return msgspec.structs.replace(config, end_flags=flags)
    raise NoServerError(f"{config.openai} takes neither ignore_eos nor ignore_end: leave --ignore-end out")


class OpenAIPlayer:
    def __init__(self, config: Config, index: int) -> None:
        self.left = False
        self.heard_frames = 0
        self.late: list[Amendment] = []
        self._config = config
        self._name = f"{config.run}-{index}"
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> None:
        if self._session is not None:
            return
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=self._config.silence)
        self._session = aiohttp.ClientSession(
            headers=headers(self._config), timeout=timeout, connector=aiohttp.TCPConnector(limit=1)
        )

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def linger(self, seconds: float) -> None:
        """Nothing can come late: a stream ends with its connection's answer."""

    async def tell(self, wish: Wish, phase: Phase, intended: float, fate: Fate) -> Telling:
        telling = Telling(
            wish, Told(wish.player, wish.number, phase, intended, begun=time.monotonic()), self._config.max_tokens
        )
        told = telling.told
        await self.connect()
        try:
            while told.ending is None and told.given_up is None:
                await self._ask(telling, fate)
        except BadStreamError as bad:
            told.fail("nonsense")
            told.faults.append(str(bad))
        except TimeoutError:
            told.fail("silence")
        except (aiohttp.ClientError, OSError):
            told.fail("connection")
            self.left = not told.accepted
        if told.accepted and told.ending is None and told.given_up not in ("expired", "failed"):
            told.faults.append("an accepted ask got no ending")
        if told.ended is None:
            told.ended = time.monotonic()
        return telling

    async def _ask(self, telling: Telling, fate: Fate) -> None:
        told = telling.told
        told.sent = told.sent or time.monotonic()
        assert self._session is not None
        async with self._session.post(path(self._config), json=body(self._config, telling.wish, self._name)) as answer:
            if answer.status == 200:
                told.accepted += 1
                await self._hear(answer, telling, fate)
                return
            code = _code(answer.status, await answer.read())
            told.errors[code] += 1
            told.refusals[code] += 1
            waited = time.monotonic() - told.sent
            if answer.status not in TRY_AGAIN or waited > self._config.patience:
                told.given_up = code
                return
            pause = min(_retry_after(answer.headers.get("Retry-After")), self._config.patience)
        await asyncio.sleep(pause * random.uniform(1.0, 1.1))

    async def _hear(self, answer: aiohttp.ClientResponse, telling: Telling, fate: Fate) -> None:
        """The stream to its end."""
        told = telling.told
        usage: ChunkUsage | None = None
        ending: str | None = None
        due, closed = fate.deed, False
        async for line in answer.content:
            if due and told.frames >= fate.after_frames:
                if due == "cancel":
                    told.cancelled = told.hung_up = True
                    answer.close()
                    telling.end("cancelled", told.frames, 0, time.monotonic(), exact=False)
                    told.tokens = 0
                    return
                told.stalled, due = True, None
                await asyncio.sleep(STALL_S)
                telling.pause()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                closed = True
                continue
            chunk = _chunk(data)
            if chunk.error:
                code = str(chunk.error.code or chunk.error.type or "failed")
                told.fail(code)
                told.ending = code if code in ("expired", "failed") else None
                return
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ending = self._choice(choice, telling, ending)
        if ending is None or not closed:
            raise BadStreamError("the stream ended without a finish_reason or without [DONE]")
        if usage is None:
            told.faults.append("no usage came")
            usage = ChunkUsage(0, told.frames)
        exact = self._config.ignore_end
        telling.end(ending, usage.completion_tokens, usage.prompt_tokens, time.monotonic(), exact=exact)

    def _choice(self, choice: Choice, telling: Telling, ending: str | None) -> str | None:
        text = choice.text or choice.delta.get("content")
        if text:
            if ending is not None:
                telling.told.faults.append("text came after the ending")
            self.heard_frames += 1
            telling.hear(str(telling.told.frames + 1), text, time.monotonic())
        if choice.finish_reason and ending is not None:
            telling.told.repeated += 1
            telling.told.faults.append("a second finish_reason came")
        return choice.finish_reason or ending


def _chunk(data: bytes) -> Chunk:
    try:
        return _chunks.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise BadStreamError(f"expected a chunk of a completion, got {data[:80]!r}: {wrong}") from None


def _code(status: int, answer: bytes) -> str:
    """The code in OpenAI's error object, or the status where there is none."""
    if status in TRY_AGAIN:
        return TRY_AGAIN[status]
    try:
        error = _chunks.decode(answer).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    return str(error.code) if error and error.code else f"http_{status}"


def _retry_after(seconds: str | None) -> float:
    try:
        return max(0.001, float(seconds or TRY_AGAIN_S))
    except ValueError:
        return TRY_AGAIN_S
