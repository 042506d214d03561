"""The engine's loop beside a model that says the same token for ever: what it reads ahead leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

from storyteller.cache import Blocks
from storyteller.engine import Engine
from storyteller.scheduler import Scheduler
from storyteller.story import BLOCK, Chunk


class SameToken:
    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        self.num_steps += 1
        return [None if chunk.sampling is None else 7 for chunk in chunks]


def an_engine(num_blocks: int) -> tuple[Engine, SameToken]:
    model = SameToken()
    return Engine(model, Scheduler("continuous", 4, Blocks(num_blocks), 64), lambda report: None), model


def test_what_was_read_ahead_is_found_by_later_stories() -> None:
    engine, _ = an_engine(num_blocks=8)
    prompt = list(range(2 * BLOCK + 1))
    engine.read_ahead([prompt])
    assert engine.scheduler.blocks.find(prompt).num_tokens == 2 * BLOCK
    assert engine.scheduler.blocks.find([*prompt, 5]).num_tokens == 2 * BLOCK + 1
    assert (engine.scheduler.num_held, engine.scheduler.blocks.num_held) == (0, 0)


def test_a_prompt_that_can_never_fit_is_not_read_ahead_and_takes_no_place() -> None:
    engine, model = an_engine(num_blocks=1)
    engine.read_ahead([list(range(2 * BLOCK))])
    assert model.num_steps == 0
    assert engine.scheduler.num_held == 0
    assert engine.num_free == 4
