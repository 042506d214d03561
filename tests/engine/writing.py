"""Writes stories with a `Model` and nothing else: who joins when, in which order and pieces is up to the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from storyteller.model import Model
from storyteller.story import BLOCK, Chunk, Sampling, numbers


@dataclass
class Tale:
    """One story to write: `tokens` begins as its prompt and grows to `length`."""

    prompt: list[int]
    sampling: Sampling
    length: int  # tokens to write
    joins: int = 0  # the step at which it joins
    piece: int = 10**9  # most prompt tokens a step
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def told(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


def write(model: Model, tales: Sequence[Tale], blocks: Sequence[int] | None = None) -> list[list[int]]:
    """Steps until every tale has its length; the told tokens of each. `blocks` is the order in which memory is used."""
    size = -(-model.window // BLOCK)
    order = list(blocks or range(size * len(tales)))
    homes = [numbers(order[i * size : (i + 1) * size]) for i in range(len(tales))]
    for tale in tales:
        tale.tokens, tale.computed = list(tale.prompt), 0
    step = 0
    while any(len(tale.told) < tale.length for tale in tales):
        chunks, telling = [], []
        for tale, home in zip(tales, homes, strict=True):
            if tale.joins > step or len(tale.told) >= tale.length:
                continue
            end = min(len(tale.tokens), tale.computed + tale.piece)
            whole = end == len(tale.tokens)
            sampling = tale.sampling if whole else None
            tokens = numbers(tale.tokens[:end])
            chunks.append(Chunk(tokens[tale.computed :], tale.computed, home, sampling, tokens))
            tale.computed = end
            telling.append(tale)
        for tale, token in zip(telling, model.step(chunks) if chunks else [], strict=True):
            if token is not None:
                tale.tokens.append(token)
        step += 1
    return [tale.told for tale in tales]
