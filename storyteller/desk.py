"""What one model can tell: makes stories out of asks, and says what this storyteller serves.

Here meet the ask, the voice and the model's limits: tokens of the prompt, room in the window, room in the memory. It
knows neither Redis nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from storyteller import wire
from storyteller.config import Config
from storyteller.inbox import Taken
from storyteller.prompts import Prompter, PromptError
from storyteller.story import BLOCK, Sampling, Story
from storyteller.tale import Tale
from storyteller.text import Detokenizer


class UntellableError(ValueError):
    """This ask cannot be told; the message says why, in words for the player."""


class Card(Protocol):
    """What the desk needs to know of a model (`storyteller.model.Model`)."""

    name: str
    revision: str
    window: int
    tokenizer: Any
    end_ids: frozenset[int]


class Desk:
    def __init__(
        self,
        config: Config,
        model: Card,
        prompter: Prompter,
        detokenizer: Callable[[], Detokenizer],
        num_blocks: int,
    ) -> None:
        self._config = config
        self._model = model
        self._prompter = prompter
        self._detokenizer = detokenizer
        self._kv_tokens = num_blocks * BLOCK

    def tale(self, ask: wire.Ask, taken: Taken) -> Tale:
        """The ask as a story to write, going on from what was told; `UntellableError` where that cannot be."""
        try:
            prompt = self._prompter.tokens(ask.prompt, ask.voice)
            settings = self._prompter.sampling(ask)
        except PromptError as error:
            raise UntellableError(str(error)) from None
        room = self.room(len(prompt))
        if room < 1:
            raise UntellableError(f"prompt: expected at most {self._longest} tokens, got {len(prompt)}")
        story = Story(
            id=ask.story,
            prompt=prompt,
            sampling=settings,
            max_tokens=min(ask.settings.max_tokens or self._config.max_tokens, self._config.max_tokens, room),
            stop_ids=frozenset() if ask.settings.ignore_end else self._model.end_ids,
            stop=ask.settings.stop,
            told=[token for entry in taken.told for token in entry.tokens],
            is_suspect=taken.crashes >= wire.MAX_CRASHES - 1,
        )
        tale = Tale(story, taken.attempt, self._detokenizer(), taken.told)
        tale.unknown_words = " ".join(self._prompter.unknown_words(ask.prompt))
        return tale

    def unreadable(self, taken: Taken) -> Tale:
        """A tale that can only fail."""
        story = Story(id=taken.story, prompt=(), sampling=Sampling(), max_tokens=1)
        return Tale(story, taken.attempt, self._detokenizer(), taken.told)

    def room(self, num_prompt: int) -> int:
        """Tokens left for a story behind such a prompt. The last one is told, never computed: it needs no memory."""
        return min(self._model.window - num_prompt, self._kv_tokens + 1 - num_prompt)

    @property
    def _longest(self) -> int:
        return min(self._model.window, self._kv_tokens + 1) - 1

    def measure(self, question: wire.Question) -> int:
        """Tokens of a prompt, -1 where it cannot be given to this model."""
        try:
            return len(self._prompter.tokens(question.prompt, question.voice))
        except PromptError:
            return -1

    def house(self, **state: Any) -> wire.House:
        return wire.House(
            model=self._model.name,
            revision=self._model.revision,
            window=self._model.window,
            kv_tokens=self._kv_tokens,
            max_tokens=self._config.max_tokens,
            batch_size=1 if self._config.batching == "single" else self._config.batch_size,
            deadline_s=self._config.deadline_s,
            overhead=self._prompter.overhead,
            default_voice=self._prompter.default,
            voices=self._prompter.voices,
            **state,
        )
