"""What travels between the gateways and the storytellers: every Redis key, every message, every script.

The gateways import this module and no other of this package. It promises that both sides agree on

* the names of all keys (`Key`) and what each holds,
* the messages inside them (`Ask`, `House`, `Ending`) and their codec,
* the Lua scripts, each one atomic step of a story's life (`script`),
* the grammar of settings (`read_settings`), so that every service reports a wrong variable in the same words.

It does not talk to Redis: `gateway/stories.py`, `storyteller/inbox.py` and `storyteller/outbox.py` do.

A story's life in Redis
-----------------------
``ask``       adds an entry to the stream `asks` and the story's id to `waiting`, whose order is the order of turns.
``take``      moves the first of `waiting` into a storyteller's pending list and opens the next attempt.
``tell``      appends text to ``told:<story>`` under ids ``<attempt>-<seq>``: an older attempt and a repeated write are
              refused by their ids alone.
``requeue``   puts a story whose storyteller is gone back to the front of `waiting` and closes its attempt.
An ending, wherever it comes from (told, cancelled, expired, dead), is one function of `scripts/prelude.lua`: it takes
the story out of every place above, frees the player's place, and lets the told text live for `RETENTION_S` more.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

RETENTION_S = 600
"""How long a finished story stays readable, in seconds."""
LEASE_S = 8
"""A storyteller silent for so long is taken for dead and its stories go on elsewhere, in seconds."""
MAX_CRASHES = 3
"""A story that was being written when its storyteller died so many times is not tried again."""
PRESENCE_S = 5
"""A storyteller that made no step, or was not idle, within so many seconds does not count as live."""


class Key:
    """Names of all Redis keys, in one place."""

    ASKS = "asks"  # stream: every unfinished ask, its consumer group holds who writes which
    GROUP = "storytellers"  # that group
    WAITING = "waiting"  # sorted set: stories that nobody writes yet, by the time of their turn in ms
    CANCELS = "cancels"  # stream, read by every storyteller: stories to stop
    DEAD = "dead"  # stream: asks that killed their storyteller too often, for the operator
    HOUSES = "houses"  # hash: storyteller -> House, what it serves and when it last made a step
    MEASURES = "measures"  # list: questions to any storyteller: how many tokens does this prompt have?

    @staticmethod
    def story(story: str) -> str:
        """Hash: the ask's stream entry, player, attempts, crashes, times; there until the story is forgotten."""
        return f"story:{story}"

    @staticmethod
    def told(story: str) -> str:
        """Stream: the story as told so far, entry ids <attempt>-<seq>."""
        return f"told:{story}"

    @staticmethod
    def player(player: str) -> str:
        """Set: the player's unfinished stories."""
        return f"player:{player}"

    @staticmethod
    def wake(gateway: str) -> str:
        """Stream: wakes one gateway's reader, so that it begins to read a new story at once."""
        return f"wake:{gateway}"

    @staticmethod
    def measured(question: str) -> str:
        """List of one: the answer to a question in `MEASURES`."""
        return f"measured:{question}"


class Words(msgspec.Struct, frozen=True, tag="words"):
    """One to eight words that a story should grow from."""

    words: tuple[str, ...]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Free text, told in a voice and through the model's chat template."""

    text: str


class Raw(msgspec.Struct, frozen=True, tag="raw"):
    """A prompt that the model gets exactly as it is."""

    text: str


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Chat(msgspec.Struct, frozen=True, tag="chat"):
    """Messages for the model's own chat template, without a voice."""

    messages: tuple[Message, ...]


Prompt = Words | Text | Raw | Chat
Priority = Literal["high", "normal"]
FinishReason = Literal["stop", "length", "cancelled", "expired", "failed"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "expired", "failed")

Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a story is drawn from the model; `None` leaves it to the voice, or to no limit where there is no voice."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    stop: Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...], msgspec.Meta(max_length=4)] = ()
    ignore_end: bool = False


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accepted wish for a story, as it waits in the stream `asks`."""

    story: str
    prompt: Prompt
    seed: Seed
    settings: Settings = Settings()
    voice: str | None = None
    player: str | None = None
    priority: Priority = "normal"


class Told(msgspec.Struct, frozen=True):
    """One entry of a story's stream: text, and the tokens it was made of, so that another storyteller can go on."""

    offset: int  # characters of the story before this text
    text: str
    tokens: tuple[int, ...]


class Ending(msgspec.Struct, frozen=True):
    """How a story ended. The times are milliseconds since the ask was accepted, on Redis' own clock."""

    finish_reason: FinishReason
    length: int  # characters of the whole story
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: int = 0
    first_text_ms: int = 0
    total_ms: int = 0
    reason: str = ""  # for a failed story: why, in words for the player
    unknown_words: tuple[str, ...] = ()  # words of the ask that the model's vocabulary does not have


class Voice(msgspec.Struct, frozen=True):
    """What a gateway tells of a storyteller's voice."""

    name: str
    manner: str
    opening: str = ""


class House(msgspec.Struct, frozen=True):
    """What a storyteller serves and how it is doing; rewritten every second."""

    at_ms: int  # Redis' clock: when it last made a step, or was idle
    model: str
    revision: str
    window: int  # tokens, prompt and story together
    kv_tokens: int  # budget: no story can be longer
    max_tokens: int
    batch_size: int
    deadline_s: float
    running: int = 0
    waiting: int = 0  # taken, not yet in the batch
    story_s: float = 0.0  # seconds that a story takes from its first step to its end, moving average
    draining: bool = False
    overhead: int = 0  # most tokens that voice and template add to a player's words
    default_voice: str = ""
    voices: dict[str, Voice] = {}


class Question(msgspec.Struct, frozen=True):
    """Asks any storyteller for the length of a prompt, where a bound by bytes is not enough to accept it."""

    question: str
    prompt: Prompt
    voice: str | None = None


Kind = TypeVar("Kind", bound=msgspec.Struct)

encode = msgspec.msgpack.Encoder().encode


def decode(kind: type[Kind], data: bytes) -> Kind:
    """One message from its bytes; `msgspec.ValidationError` where they are not of that kind."""
    return msgspec.msgpack.decode(data, type=kind)


def cursor(story: str, offset: int) -> str:
    """The place right behind the first `offset` characters of a story, bound to that story.

    It counts characters, not entries: entries are cut anew when another storyteller goes on, characters never change.
    """
    return f"{offset}.{zlib.crc32(f'{story} {offset}'.encode()):08x}"


def offset_of(story: str, text: str) -> int:
    """The offset inside a cursor; `ValueError` for one that is malformed or of another story."""
    found = re.fullmatch(r"(0|[1-9][0-9]{0,9})\.[0-9a-f]{8}", text)
    if found is None:
        raise ValueError("malformed")
    offset = int(found[1])
    if cursor(story, offset) != text:
        raise ValueError("of another story")
    return offset


def script(name: str) -> str:
    """The source of one Lua script, with the functions that all of them share."""
    folder = files(__package__) / "scripts"
    constants = f"local RETENTION_MS, LEASE_MS, MAX_CRASHES = {RETENTION_S * 1000}, {LEASE_S * 1000}, {MAX_CRASHES}\n"
    prelude = (folder / "prelude.lua").read_text(encoding="utf-8")
    return constants + prelude + (folder / f"{name}.lua").read_text(encoding="utf-8")


class SettingsError(ValueError):
    """A setting is wrong; the message is one line for a terminal."""


def setting(expected: str, meaning: str, *, secret: bool = False, **bounds: Any) -> msgspec.Meta:
    """Describes one setting: what its value must be and what it is for, in words, and the bounds that are checked."""
    return msgspec.Meta(title=expected, description=meaning, extra={"secret": secret}, **bounds)


def settings_of(kind: type[msgspec.Struct]) -> list[tuple[str, str, str, bool, Any]]:
    """Name, what is expected, meaning, whether it is secret, and default of each setting in `kind`."""
    rows = []
    for field in msgspec.structs.fields(kind):
        info: Any = msgspec.inspect.type_info(field.type)
        words = info.extra_json_schema
        rows.append((field.encode_name, words["title"], words["description"], info.extra["secret"], field.default))
    return rows


def read_settings(kind: type[Kind], environ: Mapping[str, str]) -> Kind:
    """Reads the variables that `kind`'s fields name, checked by their types and bounds.

    An empty variable counts as unset. `NAME_FILE` names a file that holds the value of `NAME`, for secrets.

    Raises:
        SettingsError: with the variable, its value (never a secret's) and what was expected.
    """
    found: dict[str, str] = {}
    for name, expected, _, secret, _ in settings_of(kind):
        value, path = environ.get(name, "").strip(), environ.get(f"{name}_FILE", "").strip()
        if path and not value:
            try:
                value = Path(path).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{name}_FILE={path}: expected a readable file ({error})") from None
        if not value:
            continue
        try:
            msgspec.convert({**found, name: value}, kind, strict=False)
        except msgspec.ValidationError:
            shown = "(hidden)" if secret else re.sub(r"//[^/@]*@", "//(hidden)@", value)
            raise SettingsError(f"{name}={shown}: expected {expected}") from None
        found[name] = value
    return msgspec.convert(found, kind, strict=False)
