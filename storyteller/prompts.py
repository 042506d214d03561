"""A player's words or free text, in a storyteller's voice, to the tokens that the model reads.

Words and free text go through the voice's prompt and the model's own chat template; messages of a chat through the
template alone; raw prompts as they are. A model without a template gets a plain instruction with the words, or the
free text as it is. The voices stand in `voices.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from storyteller import wire
from storyteller.story import Sampling

DEFAULTS = Sampling(temperature=0.8, top_k=40, top_p=0.95)
"""Settings of a story whose voice says nothing else; raw prompts and chats have none of the voice's."""


class PromptError(ValueError):
    """This prompt cannot be given to this model; the message says why, in words for the player."""


class VoiceText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One voice, as `voices.toml` has it."""

    name: str
    manner: str
    system: str
    words: str
    opening: str = ""
    text: str = "{text}"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class VoiceBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default: str
    voices: dict[str, VoiceText]


def read_voices() -> VoiceBook:
    """The voices that ship with the storyteller; `msgspec.ValidationError` names what is wrong in them."""
    text = (files(__package__) / "voices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), VoiceBook)


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Any, book: VoiceBook) -> None:
        self._tokenizer = tokenizer
        self._book = book
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        unknown = getattr(tokenizer, "unk_token_id", None)
        # A byte-level vocabulary knows every word; its "unknown" token, where it has one, never comes.
        self._unknown_id = unknown if isinstance(unknown, int) and self._loses_words(unknown) else None
        self.default = book.default
        self.overhead = max(len(tokens) for tokens in self.beginnings())  # tokens a voice adds to words, at most

    @property
    def voices(self) -> dict[str, wire.Voice]:
        return {key: wire.Voice(voice.name, voice.manner, voice.opening) for key, voice in self._book.voices.items()}

    def voice(self, key: str | None) -> VoiceText:
        """`PromptError` for a voice that is not there."""
        found = self._book.voices.get(key or self._book.default)
        if found is None:
            raise PromptError(f"voice: expected one of {', '.join(self._book.voices)}, got {key!r}")
        return found

    def tokens(self, prompt: wire.Prompt, voice: str | None) -> list[int]:
        """The prompt's tokens, at least one; `PromptError` where there can be none."""
        match prompt:
            case wire.Raw(text):
                tokens = self._encode(text, special=True)
            case wire.Chat(messages):
                tokens = self._chat([{"role": message.role, "content": message.content} for message in messages])
            case wire.Words(words):
                spoken = self.voice(voice)
                request = spoken.words.format(words=", ".join(words))
                tokens = self._told(spoken, request, f"Once upon a time there was a story of {', '.join(words)}.")
            case wire.Text(text):
                spoken = self.voice(voice)
                tokens = self._told(spoken, spoken.text.format(text=text), text)
        if not tokens:
            begin = self._tokenizer.bos_token_id
            begin = self._tokenizer.eos_token_id if begin is None else begin
            if begin is None:
                raise PromptError("prompt: expected text, got none, and this model has no token to begin with")
            tokens = [begin]
        return tokens

    def sampling(self, ask: wire.Ask) -> Sampling:
        """How the ask's tokens are drawn: by its own settings, else by the voice's, else by the defaults."""
        voice = self.voice(ask.voice) if isinstance(ask.prompt, wire.Words | wire.Text) else None

        def chosen(name: str) -> Any:
            own, of_voice = getattr(ask.settings, name), getattr(voice, name, None)
            return own if own is not None else of_voice if of_voice is not None else getattr(DEFAULTS, name)

        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return Sampling(seed=ask.seed, **{name: chosen(name) for name in names})

    def unknown_words(self, prompt: wire.Prompt) -> list[str]:
        """Words of the ask that this model's vocabulary does not have, and which its story will lack."""
        if self._unknown_id is None or isinstance(prompt, wire.Raw | wire.Chat):
            return []
        words: Sequence[str] = prompt.words if isinstance(prompt, wire.Words) else prompt.text.split()
        return [word for word in words if self._unknown_id in self._encode(word, special=False)]

    def beginnings(self) -> list[list[int]]:
        """Of each voice, a prompt with its shortest words: what its prompts have in common can be computed once."""
        return [self.tokens(wire.Words(("a",)), key) for key in self._book.voices]

    def _told(self, voice: VoiceText, request: str, plain: str) -> list[int]:
        if not self._has_template:
            return self._encode(plain, special=True)
        return self._chat([{"role": "system", "content": voice.system}, {"role": "user", "content": request}])

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self._has_template:
            return self._encode("\n".join(message["content"] for message in messages), special=True)
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything for roles that it does not know
            raise PromptError(f"messages: the model's chat template refused them ({error})") from None
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _loses_words(self, unknown: int) -> bool:
        return unknown in self._encode("\u2603\u0416\u5b57", special=False)
