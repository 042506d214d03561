"""The loop that writes all stories: admit, step, tell.

It runs in a thread of its own and owns the scheduler and the model; nobody else touches them. Others speak to it
through `begin`, `end` and `stop`, which never block, and hear from it through `report`, called after every step in the
engine's own thread. When nothing is to be done it sleeps until somebody speaks.

It works in tokens: turning them into text, and sending it, happens elsewhere while the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from storyteller.scheduler import Scheduler, Step
from storyteller.story import Chunk, Phase, Sampling, Story
from storyteller.wire import FinishReason


class Stepper(Protocol):
    """What the engine needs of a model: one ragged forward pass (`storyteller.model.Model.step`)."""

    def step(self, chunks: Sequence[Chunk]) -> list[int | None]: ...


@dataclass(slots=True)
class Report:
    """What came of one step, or of a word from outside while there was none."""

    told: list[tuple[Story, int]] = field(default_factory=list)  # tokens, in the order of the batch
    ended: list[Story] = field(default_factory=list)  # after their last token
    step: Step | None = None
    num_cached: int = 0  # prompt tokens of newcomers that were computed before
    seconds: float = 0.0


class Engine:
    """Writes stories in one batch until it is stopped."""

    def __init__(
        self,
        model: Stepper,
        scheduler: Scheduler,
        report: Callable[[Report], None],
        batch_wait_s: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self._model = model
        self._report = report
        self._batch_wait_s = batch_wait_s
        self._words: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended: list[Story] = []
        self._stopping = False
        self._batch_since: float | None = None  # static: when the batch that is being formed got its first story
        self.progress_at = time.monotonic()  # when it last made a step, or was idle

    def read_ahead(self, prompts: Sequence[Sequence[int]]) -> None:
        """Computes prompts before anybody asks, so that what they share with later ones is there. Before `run`.

        One that the memory can never hold is left out: no story with it will come.
        """
        for number, prompt in enumerate(prompts):
            story = Story(f"read ahead {number}", prompt, Sampling(), max_tokens=1)
            if self.scheduler.fits(story):
                self.scheduler.add(story)
            while self.scheduler.num_held:
                step = self.scheduler.schedule()
                self.scheduler.complete(step, self._model.step(step.chunks))

    def begin(self, story: Story) -> None:
        """A story to write, in the order of its turn."""
        self._words.put(lambda: self.scheduler.add(story))

    def end(self, story: Story, reason: FinishReason) -> None:
        """Ends a story early; reported like any other ending, once, unless it has ended already."""
        self._words.put(lambda: self._end(story, reason))

    def stop(self) -> None:
        """Ends the loop before its next step; the stories stay as they are."""
        self._words.put(self._stop)

    @property
    def num_free(self) -> int:
        """Places for further stories, as seen from any thread."""
        return self.scheduler.batch_size - self.scheduler.num_held - self._words.qsize()

    def run(self) -> None:
        while self._listen():
            step = self.scheduler.schedule(self._batch_is_complete())
            self._tell(step, *self._compute(step))

    def _listen(self) -> bool:
        """Takes in what was said; waits for a word where there is nothing to compute. False: it is over."""
        while not self._stopping:
            idle = self.scheduler.num_held == 0 and not self._ended
            try:
                self._words.get(timeout=0.5 if idle else 0)()
            except Empty:
                if not idle:
                    break
                self.progress_at = time.monotonic()
        return not self._stopping

    def _compute(self, step: Step) -> tuple[list[int | None], float]:
        if not step.chunks:
            return [], 0.0
        start = time.perf_counter()
        tokens = self._model.step(step.chunks)
        return tokens, time.perf_counter() - start

    def _tell(self, step: Step, tokens: list[int | None], seconds: float) -> None:
        newcomers = filter(_is_new, step.stories) if step.num_prefill else ()
        num_cached = sum(story.num_cached for story in newcomers)
        told = self.scheduler.complete(step, tokens)
        ended = [*self._ended, *(story for story, _ in told if story.phase is Phase.ENDED)]
        self._ended = []
        self.progress_at = time.monotonic()
        if step.chunks or ended:
            self._report(Report(told, ended, step, num_cached, seconds))
        elif self.scheduler.num_held:
            time.sleep(0.0005)  # a static batch that waits to fill

    def _batch_is_complete(self) -> bool:
        waiting = len(self.scheduler.waiting)
        if not waiting:
            self._batch_since = None
        elif self._batch_since is None:
            self._batch_since = time.monotonic()
        if waiting >= self.scheduler.batch_size:
            return True
        return self._batch_since is not None and time.monotonic() - self._batch_since >= self._batch_wait_s

    def _end(self, story: Story, reason: FinishReason) -> None:
        if story.phase is not Phase.ENDED:
            self.scheduler.end(story, reason)
            self._ended.append(story)

    def _stop(self) -> None:
        self._stopping = True


def _is_new(story: Story) -> bool:
    """Whether this is its first step: nothing is computed but what came from the prefix cache."""
    return story.num_told == len(story.told) and story.num_computed == story.num_cached
