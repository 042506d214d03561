"""Token ids to text that is safe to send: whole characters, nothing of a stop string, words joined properly.

A story is pushed token by token and comes out in pieces whose concatenation is the story, whatever the size of the
pushes. Text is held back only where it must be: a character that has not all its bytes, and the beginning of a stop
string that may still come. Everything held is given out, or dropped, when the story ends.

Not covered: markup of special tokens, which never appear in a story.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""


class Detokenizer(Protocol):
    """Turns the tokens of one story into text; `push` gives what became certain, `finish` what was held back."""

    def push(self, tokens: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class WindowDetokenizer:
    """For tokenizers that write bytes (BPE, Unigram): decodes a short window again and sends what was added.

    The window begins at the last place where the text was whole, so that a token sees its left neighbours; that is
    how transformers' and vLLM's streamers do it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_sent = 0  # leading tokens of the window whose text is out

    def push(self, tokens: Sequence[int]) -> str:
        self._window.extend(tokens)
        before = self._decode(self._window[: self._num_sent])
        now = self._decode(self._window)
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self._window = self._window[self._num_sent :] if self._num_sent else self._window
        piece = now[len(before) :]
        self._num_sent = len(self._window)
        return piece

    def finish(self) -> str:
        before = self._decode(self._window[: self._num_sent])
        return self._decode(self._window)[len(before) :].rstrip(UNFINISHED)


class WordDetokenizer:
    """For tokenizers of whole words (WordLevel, WordPiece): puts spaces where a person would."""

    _closing = frozenset(".,!?;:)]}%…”’")
    _opening = frozenset("([{“‘$#")

    def __init__(self, words: Callable[[Sequence[int]], Sequence[str]], continuation: str) -> None:
        self._words = words
        self._continuation = continuation
        self._last = ""
        self._quoted = False  # inside "..."

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(self._join(word) for word in self._words(tokens))

    def finish(self) -> str:
        return ""

    def _join(self, word: str) -> str:
        if self._continuation and word.startswith(self._continuation):
            return word[len(self._continuation) :]
        last, self._last = self._last, word
        glued = not last or last[-1] in self._opening or (last == '"' and self._quoted)
        glued = glued or word[0] in self._closing or (word[0] == "'" and last[-1].isalnum())
        glued = glued or (last in ("'", "’") and word in ("s", "t", "re", "ve", "ll", "d", "m"))
        if word == '"':
            glued = glued or self._quoted
            self._quoted = not self._quoted
        return word if glued else f" {word}"


def detokenizer_for(tokenizer: Any) -> Callable[[], Detokenizer]:
    """Makes detokenizers for a transformers tokenizer, one a story."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(fast.to_str())["model"] if fast is not None else {}
    if model.get("type") in ("WordLevel", "WordPiece"):
        special = frozenset(tokenizer.all_special_ids)
        continuation = model.get("continuing_subword_prefix") or ""

        def words(tokens: Sequence[int]) -> list[str]:
            return tokenizer.convert_ids_to_tokens([token for token in tokens if token not in special])  # type: ignore[no-any-return]

        return lambda: WordDetokenizer(words, continuation)

    def decode(tokens: Sequence[int]) -> str:
        if fast is not None:
            return fast.decode(tokens, skip_special_tokens=True)  # type: ignore[no-any-return]
        return tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[no-any-return]

    return lambda: WindowDetokenizer(decode)


class StopStrings:
    """Lets text through up to the first stop string, and holds back only what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found or not self._stop:
            return "" if self.found else text
        self._held += text
        # The one that is whole first counts, not the one that begins first: so the size of a push changes nothing.
        found = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.found = True
            piece, self._held = self._held[: min(found)[1]], ""
            return piece
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece

    def finish(self) -> str:
        piece, self._held = self._held, ""
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
