"""One story between the engine's tokens and the words that are told: what is out, what is held, what is unsent.

It belongs to the event loop; the engine knows only its `Story`. Tokens come in with `push`; `cut` turns all that came
since the last one into tellings, which stay in `unsent` until Redis has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from storyteller import wire
from storyteller.outbox import Telling
from storyteller.story import Story
from storyteller.text import Detokenizer, StopStrings


class Tale:
    """The told side of one attempt at a story, which goes on from what earlier attempts told."""

    def __init__(self, story: Story, attempt: int, detokenizer: Detokenizer, told: Sequence[wire.Told] = ()) -> None:
        self.story = story
        self.attempt = attempt
        self.unsent: list[Telling] = []
        self.unknown_words = ""  # of the ask, for the player
        self.failure = ""  # why it failed, for the player
        self.is_closed = False  # its ending is cut, or another storyteller has it
        self._detokenizer = detokenizer
        self._stops = StopStrings(story.stop)
        self._fresh: list[int] = []  # tokens that came since the last cut
        self._silent: list[int] = []  # tokens whose text is still held back
        self._number = 0
        self._offset = sum(len(entry.text) for entry in told)
        self.num_tokens = len(story.told)
        # Brings the detokenizer to where the earlier attempts were; what it says now is out already.
        self._stops.push(self._detokenizer.push(story.told))

    @property
    def is_eager(self) -> bool:
        """Whether its next token should be looked at now: the first text is awaited, or a stop string may come."""
        return bool(self.story.stop) or self._offset == 0

    def push(self, token: int) -> None:
        self.num_tokens += 1
        if token not in self.story.stop_ids:
            self._fresh.append(token)

    def cut(self, ending: wire.FinishReason | None) -> wire.FinishReason | None:
        """Makes a telling of the text that is safe to send, and the last one if the story ends.

        Returns how it ends: as `ending` says, or "stop" where the text holds a stop string.
        """
        if self.is_closed:
            return None
        text = self._stops.push(self._detokenizer.push(self._fresh))
        if self._stops.found:
            ending = "stop"
        elif ending:
            text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self._silent += self._fresh
        self._fresh = []
        if text:
            self._add(wire.Told(self._offset, text, tuple(self._silent), self.num_tokens))
            self._offset += len(text)
            self._silent = []
        if ending:
            self.is_closed = True
            usage = (len(self.story.prompt), self.num_tokens)
            self._add(wire.Ending(ending, *usage, message=self.failure, unknown_words=self.unknown_words))
        return ending

    def give_up(self, why: str) -> None:
        """Ends the tale as failed with what was told so far, whatever state its text is in."""
        self.is_closed, self.failure = True, why
        self._add(wire.Ending("failed", len(self.story.prompt), self.num_tokens, message=why))

    def _add(self, content: wire.Told | wire.Ending) -> None:
        self._number += 1
        self.unsent.append(Telling(self.story.id, self.attempt, self._number, len(self.story.prompt), content))
