"""What travels between the gateways and the storytellers: every Redis key, every message, every script.

The gateways import this module and no other of this package. It promises that both sides agree on

* the names of all keys (`Key`) and what each holds,
* the messages inside them (`Ask`, `Told`, `Ending`, `House`) and their codec,
* the Lua scripts, each one atomic step of a story's life (`script`),
* the grammar of settings (`read_settings`), so that every service reports a wrong variable in the same words.

It does not talk to Redis: `gateway/stories.py`, `storyteller/inbox.py` and `storyteller/outbox.py` do.

A story's life in Redis
-----------------------
``ask``       adds an entry to the stream `asks` and the story's id to `waiting`, whose order is the order of turns.
``take``      moves the first of `waiting` into a storyteller's pending list and opens the next attempt.
``tell``      appends text to ``told:<story>`` under ids ``<attempt>-<seq>``: an older attempt and a repeated write are
              refused by their ids alone.
``beat``      renews a storyteller's hold of its stories; ``sweep`` puts the stories of a silent one back into `waiting`
              under their old turn and closes their attempt, ``handback`` does so for one that leaves.
``heard``     keeps a story alive while somebody listens; ``cancel`` ends it.
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


TURN_S = 10
"""A player's second unfinished story waits as if asked so much later, a third twice as much."""
HIGH_S = 30
"""A story of high priority waits as if asked so much earlier."""


class Key:
    """Names of all Redis keys, in one place."""

    ASKS = "asks"  # stream: every unfinished ask; the pending list of its group says who writes which
    GROUP = "storytellers"  # that group
    WAITING = "waiting"  # sorted set: stories that nobody writes, by the time of their turn
    CANCELS = "cancels"  # stream that every storyteller reads: stories to stop
    QUESTIONS = "questions"  # stream that every storyteller reads: how many tokens has this prompt?
    PULSE = "pulse"  # hash: when anybody last swept or beat, and since when without a long pause, in ms
    DEAD = "dead"  # stream for the operator: asks that killed their storyteller too often
    LIVE = "live"  # sorted set: storytellers by the time when they last made a step or were idle, in ms
    HOUSES = "houses"  # hash: storyteller -> House
    STORY = "story:"  # + story, hash: the ask's entry, player, attempts, crashes, times
    TOLD = "told:"  # + story, stream: the story as told so far, entry ids <attempt>-<seq>
    PLAYER = "player:"  # + player, set: unfinished stories
    WAKE = "wake:"  # + gateway, stream: wakes its reader, so that a new story is read at once
    ANSWER = "answer:"  # + question, list of one: tokens


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
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...], msgspec.Meta(max_length=4)
    ] = ()
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
    """Text of a story, and the tokens it was made of, so that another storyteller can go on from here."""

    offset: int  # characters of the story before this text
    text: str
    tokens: tuple[int, ...]
    count: int  # tokens of the story, these included

    def fields(self) -> dict[str, bytes | str | int]:
        """The entry of the story's stream."""
        return {"offset": self.offset, "text": self.text, "tokens": encode(self.tokens), "count": self.count}


class Begun(msgspec.Struct, frozen=True):
    """An attempt at the story was opened (`begun`), or its storyteller was lost (`waiting`)."""

    mark: str


class Ending(msgspec.Struct, frozen=True):
    """How a story ended. The times are milliseconds since the ask was accepted, on Redis' own clock."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    message: str = ""  # for people: why, where a story failed
    unknown_words: str = ""  # words of the ask that the model does not know, separated by spaces
    seed: int = 0
    queue_ms: int = 0
    first_text_ms: int = 0
    total_ms: int = 0

    def fields(self) -> dict[str, bytes | str | int]:
        """What the storyteller knows of it; seed and times are added as it is written."""
        names = ("prompt_tokens", "completion_tokens", "message", "unknown_words")
        return {name: getattr(self, name) for name in names}


def read_entry(fields: Mapping[bytes, bytes]) -> Told | Begun | Ending:
    """One entry of a story's stream."""
    text: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items() if name != b"tokens"}
    if "text" in text:
        tokens = msgspec.msgpack.decode(fields[b"tokens"], type=tuple[int, ...])
        return Told(int(text["offset"]), text["text"], tokens, int(text["count"]))
    if "end" in text:
        return msgspec.convert(text | {"finish_reason": text["end"]}, Ending, strict=False)
    return Begun(text["mark"])


class Voice(msgspec.Struct, frozen=True):
    """What a gateway tells of a storyteller's voice."""

    name: str
    manner: str
    opening: str = ""


class House(msgspec.Struct, frozen=True):
    """What a storyteller serves and how it is doing; rewritten every second."""

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
    """The source of one Lua script, with the names, constants and functions that all of them share."""
    folder = files(__package__) / "scripts"
    names = [f"{key} = '{value}'" for key, value in vars(Key).items() if key.isupper()]
    constants = {"RETENTION_MS": RETENTION_S * 1000, "LEASE_MS": LEASE_S * 1000, "MAX_CRASHES": MAX_CRASHES}
    constants |= {"TURN_US": TURN_S * 1_000_000, "PRESENCE_MS": PRESENCE_S * 1000}
    lines = [f"local {line}" for line in [*names, *(f"{key} = {value}" for key, value in constants.items())]]
    sources = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)]
    return "\n".join([*lines, *sources])


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


def settings_help(usage: str, kind: type[msgspec.Struct], note: str = "") -> str:
    """What `--help` prints: every setting with its meaning, what is expected and its default."""
    lines = [
        f"usage: {usage}",
        "",
        "Settings, from the environment (NAME_FILE=path reads NAME from a file):",
        "",
    ]
    for name, expected, meaning, _, default in settings_of(kind):
        shown = "unset" if default == "" else default
        lines += [f"  {name}", f"      {meaning}; {expected} (default: {shown})"]
    return "\n".join([*lines, "", note]).rstrip() + "\n"


def log_config(is_terminal: bool) -> dict[str, Any]:
    """Logging for `logging.config.dictConfig`: one JSON object a line, or plain lines for people at a terminal."""
    json_lines = {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": "%(asctime)s %(levelname)s %(name)s %(message)s",
        "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
    }
    plain = {"format": "%(asctime)s %(name)s %(levelname)s %(message)s", "datefmt": "%H:%M:%S"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": plain if is_terminal else json_lines},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {"websockets": {"level": "WARNING"}, "huggingface_hub": {"level": "ERROR"}},
    }
