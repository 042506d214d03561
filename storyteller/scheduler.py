"""Decides what runs in the next step. It never computes, connects, waits or looks at a clock.

Three policies share one shape. `continuous`: stories join and leave between any two steps. `static`: a batch is
formed when the last one has ended wholly, and runs to its longest story; the rows of those that ended go on, for
nothing. `single`: one story after the other.

Memory is promised before it is used. A story is admitted only if, with every running story told to its last token, the
sum stays within the budget at every future moment; so no story is ever evicted or made to wait once it runs. A story
that fits may pass one that does not, up to `MAX_PASSES` times; then the large one's memory is kept free for it.

A step holds one token of every running story and, within `step_tokens`, pieces of new stories' prompts, so that
newcomers never stall those who are listening for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from storyteller.cache import Blocks, num_blocks_for
from storyteller.story import Chunk, Phase, Story, numbers
from storyteller.wire import FinishReason

Batching = Literal["continuous", "static", "single"]

MAX_PASSES = 16
"""So many stories may pass one that waits for memory."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: `chunks[i]` belongs to `stories[i]`."""

    stories: Sequence[Story]
    chunks: Sequence[Chunk]
    num_prefill: int  # tokens of prompts
    num_idle: int  # rows of stories that have ended (static batches only)


class Scheduler:
    """The stories that one storyteller holds: `waiting` ones in the order of their turns, `running` ones."""

    def __init__(self, batching: Batching, batch_size: int, blocks: Blocks, step_tokens: int) -> None:
        self.batching = batching
        self.batch_size = 1 if batching == "single" else batch_size
        self.blocks = blocks
        self.step_tokens = max(step_tokens, self.batch_size + 1)  # there is always room for a newcomer's token
        self.waiting: list[Story] = []
        self.running: list[Story] = []
        self._passes: dict[str, int] = {}  # how often a waiting story was passed

    @property
    def num_held(self) -> int:
        """Places taken: by stories, and in a static batch by rows that have ended."""
        return len(self.waiting) + len(self.running)

    def fits(self, story: Story) -> bool:
        """Whether the story could run if it were alone."""
        return num_blocks_for(story.final_length) <= self.blocks.num_blocks

    def add(self, story: Story) -> None:
        self.waiting.append(story)

    def end(self, story: Story, reason: FinishReason) -> None:
        """Ends a story, wherever it stands; its place and its memory are free for the next step."""
        if story.phase is Phase.ENDED:
            return
        if story in self.waiting:
            self.waiting.remove(story)
            self._passes.pop(story.id, None)
        elif self.batching != "static":
            self._leave(story)
        story.phase, story.finish_reason = Phase.ENDED, reason
        if all(other.phase is Phase.ENDED for other in self.running):
            for other in tuple(self.running):
                self._leave(other)

    def schedule(self, batch_complete: bool = True) -> Step:
        """The next step; a static batch is formed only when `batch_complete` (full, or waited for long enough)."""
        if self.batching != "static" or (not self.running and batch_complete):
            self._admit()
        stories, chunks = [], []
        room = self.step_tokens - len(self.running)
        num_prefill = num_idle = 0
        for story in self.running:
            chunk = _chunk(story, 1 + max(room, 0))
            if chunk is None:
                continue
            room -= len(chunk.tokens) - 1
            stories.append(story)
            chunks.append(chunk)
            if story.phase is Phase.ENDED:
                num_idle += 1
            elif not story.is_decoding:
                num_prefill += len(chunk.tokens)
        return Step(stories, chunks, num_prefill, num_idle)

    def complete(self, step: Step, sampled: Sequence[int | None]) -> list[tuple[Story, int]]:
        """Takes in what a step computed; returns the stories that got a token, with the token."""
        told = []
        for story, chunk, token in zip(step.stories, step.chunks, sampled, strict=True):
            if story.phase is Phase.ENDED:  # an idle row, or cancelled while it was computed
                continue
            was_prompt = story.num_computed < len(story.prompt)
            story.num_computed = chunk.start + len(chunk.tokens)
            if was_prompt and story.num_computed >= len(story.prompt):
                self.blocks.publish(story.prompt, story.blocks)
            if token is not None:
                story.tokens.append(token)
                told.append((story, token))
                if token in story.stop_ids:
                    self.end(story, "stop")
                elif story.num_remaining <= 0:
                    self.end(story, "length")
                else:
                    self._grow(story)
        return told

    def _admit(self) -> None:
        """Moves stories from waiting to running: in order, but a small one may pass a large one that must wait."""
        passed: list[Story] = []
        for story in tuple(self.waiting):
            if len(self.running) >= self.batch_size:
                break
            if story.is_suspect and any(other.is_suspect for other in self.running):
                continue  # two such stories in one batch: nobody could tell which of them killed it
            beginning = self.blocks.find(story.tokens)
            if not self._has_room_for(story, beginning.blocks):
                if self._passes.get(story.id, 0) >= MAX_PASSES:
                    break
                passed.append(story)
                continue
            self.waiting.remove(story)
            self._passes.pop(story.id, None)
            for other in passed:
                self._passes[other.id] = self._passes.get(other.id, 0) + 1
            story.num_shared = len(beginning.blocks)
            story.num_cached = story.num_computed = beginning.num_tokens
            # What is copied may be taken by `hold` here or for the next newcomer: copies are made in the order of the
            # batch and before anything is computed, so that it is still whole then.
            story.source = beginning.source
            num_new = num_blocks_for(len(story.tokens)) - story.num_shared
            story.blocks = numbers(self.blocks.hold(beginning.blocks, num_new))
            story.phase = Phase.RUNNING
            self.running.append(story)

    def _has_room_for(self, story: Story, beginning: Sequence[int]) -> bool:
        """Whether the blocks of all suffice at every future moment, each story told to its last token.

        A story that is decoding gains one token a step, so its end is known: usage peaks just before one ends. A
        story whose prompt is still being read, and the new one, count with their final length for all time, since
        nobody knows how many steps the reading takes.
        """
        shared = set(beginning)
        fixed = num_blocks_for(story.final_length) - len(shared)
        growing = []
        for other in self.running:
            shared.update(other.blocks[: other.num_shared])
            if other.is_decoding and other.phase is Phase.RUNNING:
                growing.append(other)
            else:
                fixed += num_blocks_for(other.final_length) - other.num_shared
        budget = self.blocks.num_blocks - fixed - len(shared)
        if sum(_own_blocks(other, other.num_remaining) for other in growing) <= budget:
            return True
        for moment in {other.num_remaining for other in growing}:
            if sum(_own_blocks(other, moment) for other in growing if other.num_remaining >= moment) > budget:
                return False
        return budget >= 0

    def _grow(self, story: Story) -> None:
        """Gives a running story the block that its next token needs; there is one, by the promise at admission."""
        if num_blocks_for(len(story.tokens)) > len(story.blocks):
            story.blocks.extend(self.blocks.hold((), 1))

    def _leave(self, story: Story) -> None:
        self.running.remove(story)
        self.blocks.release(story.blocks)
        story.blocks = numbers()


def _chunk(story: Story, room: int) -> Chunk | None:
    """The part of a story that the next step computes, at most `room` tokens."""
    if story.phase is Phase.ENDED:  # an idle row of a static batch: its last token once more, as padding
        start = max(story.num_computed - 1, 0)
        return Chunk(story.tokens[start : start + 1], start, story.blocks, None, story.tokens)
    stop = min(len(story.tokens), story.num_computed + room)
    is_last = stop == len(story.tokens)
    sampling = story.sampling if is_last else None
    source, story.source = story.source, None
    tokens = story.tokens[story.num_computed : stop]
    return Chunk(tokens, story.num_computed, story.blocks, sampling, story.tokens, source)


def _own_blocks(story: Story, steps: int) -> int:
    """Blocks that a decoding story holds alone after so many steps."""
    return num_blocks_for(min(len(story.tokens) + steps, story.final_length)) - story.num_shared
