"""One story's life inside a storyteller: its prompt, its tokens, where it stands, and what it still needs.

A story is told from `tokens` alone: prompt and told tokens stand in one list, so a story that another storyteller
began is the same thing as a new one with a longer list. Facts that follow from others are properties.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from storyteller.wire import FinishReason

BLOCK = 16
"""Tokens in one block of KV memory."""


def numbers(values: Iterable[int] = ()) -> array[int]:
    """Token ids or block numbers, of 64 bits each, as compiled code wants them."""
    return array("q", values)


class Sampling(NamedTuple):
    """How the next token is drawn from one row of logits; every field has its neutral value as default."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 0 is greedy
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and story alike, as in transformers
    seed: int = 0


class Chunk(NamedTuple):
    """Tokens of one story to run in one step: one token of a running story, or a piece of a new one's prompt."""

    tokens: array[int]  # the ids to compute, one or more
    start: int  # position of the first; the KV of all positions before it is in the cache
    blocks: array[int]  # the story's KV blocks, position p lives in blocks[p // BLOCK]
    sampling: Sampling | None  # None: the next token is not wanted yet (more of the prompt follows)
    history: array[int]  # all tokens up to and including this chunk, for the repetition penalty
    source: int | None = None  # a block that is copied into the block of `start` before anything is computed


class Phase(Enum):
    WAITING = auto()  # taken from the queue, holds no memory
    RUNNING = auto()  # holds blocks, has a place in the batch
    ENDED = auto()  # has its finish reason, holds nothing


@dataclass(slots=True, eq=False)
class Story:
    """One story. Lengths are in tokens."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int  # of the story, without the prompt; at least 1
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    told: Sequence[int] = ()  # tokens that an earlier attempt told
    is_suspect: bool = False  # it was in the hands of two storytellers that died: it runs with no other such story
    tokens: array[int] = field(init=False)  # prompt and story
    num_computed: int = 0  # tokens whose KV is in the cache
    blocks: array[int] = field(default_factory=numbers)
    num_shared: int = 0  # leading blocks that came from the prefix cache
    num_cached: int = 0  # tokens that came from there: in those blocks, and in the one that is copied
    source: int | None = None  # the block to copy, until its first step
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = numbers((*self.prompt, *self.told))

    @property
    def num_told(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_remaining(self) -> int:
        """Tokens that the story may still get."""
        return self.max_tokens - self.num_told

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest token are computed, so that each step from now on adds one."""
        return self.num_computed >= len(self.tokens) - 1 and self.num_told > 0

    @property
    def final_length(self) -> int:
        """Positions of KV it holds at its longest: the last token is told, never computed."""
        return len(self.prompt) + self.max_tokens - 1
