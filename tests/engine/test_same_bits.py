"""The same prompt, settings and seed give the same story: alone, in a crowd, in pieces, resumed, on any threads."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest

from storyteller.cache import Blocks
from storyteller.scheduler import Scheduler
from storyteller.story import Sampling, Story
from tests.engine.conftest import Loader
from tests.engine.writing import Tale, write

MODES: tuple[Literal["int8", "none"], ...] = ("int8", "none")


def crowd_of(num_tales: int, vocabulary: int) -> list[Tale]:
    """Stories with prompts of all lengths and settings of all kinds."""
    rng = random.Random(1)
    tales = []
    for i in range(num_tales):
        prompt = [rng.randrange(vocabulary) for _ in range(1 + i * 7 % 50)]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]), top_k=rng.choice([0, 1, 5, 40, 10**6]),
            top_p=rng.choice([1.0, 0.95, 0.5]), min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.3]), seed=rng.randrange(2**63),
        )  # fmt: skip
        tales.append(Tale(prompt, sampling, length=20 + i % 13))
    return tales


@pytest.mark.parametrize("quantize", MODES)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama_grouped"])
def test_64_sampled_stories_are_the_same_alone_and_in_a_shuffled_crowd(
    family: str, quantize: str, load: Loader
) -> None:
    model = load(family, quantize)
    tales = crowd_of(64, model.vocab_size)
    alone = [write(model, [tale])[0] for tale in tales]

    rng = random.Random(2)
    places = list(range(len(tales)))
    rng.shuffle(places)
    crowd = [tales[i] for i in places]
    for tale in crowd:
        tale.joins, tale.piece = rng.randrange(15), rng.choice([1, 3, 16, 50])
    blocks = list(range(model.num_blocks))
    rng.shuffle(blocks)
    told = write(model, crowd, blocks)

    assert [told[places.index(i)] for i in range(len(tales))] == alone


@pytest.mark.parametrize("quantize", MODES)
def test_a_story_resumed_on_a_fresh_model_goes_on_the_same(quantize: str, load: Loader) -> None:
    first = load("llama_grouped", quantize)
    tales = crowd_of(8, first.vocab_size)
    whole = write(first, tales)

    second = load("llama_grouped", quantize)
    for k in (1, 6, 19):
        resumed = [
            Tale(tale.prompt + told[:k], tale.sampling, tale.length - k)
            for tale, told in zip(tales, whole, strict=True)
        ]
        assert write(second, resumed) == [told[k:] for told in whole]


@pytest.mark.parametrize("quantize", MODES)
@pytest.mark.parametrize("num_blocks", [12, 24, 200])
def test_what_stories_share_and_copy_changes_nothing_however_little_memory_there_is(
    num_blocks: int, quantize: str, load: Loader
) -> None:
    """Beginnings that part anywhere in a block, and memory so small that what was kept is overwritten all the time."""
    model = load("llama_grouped", quantize, 2)
    rng = random.Random(3)
    voices = [[rng.randrange(model.vocab_size) for _ in range(60)] for _ in range(3)]
    tales = crowd_of(60, model.vocab_size)
    for tale in tales:
        tale.prompt = rng.choice(voices)[: rng.randrange(60)] + tale.prompt[:20]
    alone = [write(model, [tale])[0] for tale in tales]

    scheduler = Scheduler("continuous", 8, Blocks(num_blocks), step_tokens=24)
    stories = [Story(str(i), tale.prompt, tale.sampling, tale.length) for i, tale in enumerate(tales)]
    for story in stories:
        scheduler.add(story)
    num_copies = 0
    while scheduler.num_held:
        step = scheduler.schedule()
        num_copies += sum(chunk.source is not None for chunk in step.chunks)
        scheduler.complete(step, model.step(step.chunks))
    assert [list(story.tokens[len(story.prompt) :]) for story in stories] == alone
    assert num_copies > 0


@pytest.mark.parametrize("quantize", MODES)
def test_the_number_of_threads_changes_nothing(quantize: str, load: Loader) -> None:
    stories = []
    for threads in (1, 2, 3):
        model = load("gpt_neox_sequential", quantize, threads)
        stories.append(write(model, crowd_of(16, model.vocab_size)))
    assert stories[0] == stories[1] == stories[2]


@pytest.mark.parametrize("quantize", MODES)
def test_memory_that_holds_no_numbers_harms_nobody(quantize: str, load: Loader) -> None:
    """A block may come from a story that went wrong: what lies behind a story's own positions counts for nothing."""
    model = load("llama", quantize, stories=8)
    tales = crowd_of(4, model.vocab_size)
    clean = write(model, tales)
    model._memory.view(np.uint8)[:] = 0xFF  # no number, as a float32
    assert write(model, tales) == clean
