"""Drawing follows transformers' own processors in order and effect, and no value of a setting breaks a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from storyteller.ranking import make_desk
from storyteller.sampling import draw_all, uniform, wishes_of
from storyteller.story import Chunk, Sampling, numbers
from tests.engine.conftest import Loader
from tests.engine.writing import Tale, write

HISTORY = [3, 5, 5, 250]


def draws(logits: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    """`count` tokens from the same logits at positions 0, 1, 2..."""
    vocabulary = logits.size
    width = -(-vocabulary // 64) * 64
    rows = np.zeros((count, width), np.float32)
    rows[:, :vocabulary] = logits
    wishes = wishes_of([sampling] * count, range(count), [numbers(HISTORY)] * count)
    tokens = np.zeros(count, np.int64)
    draw_all(rows.reshape(-1), vocabulary, width, wishes, make_desk(vocabulary, width), 0, tokens)
    return tokens


def expected(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities that transformers would draw from."""
    steps: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    processed = LogitsProcessorList(steps)(torch.tensor([HISTORY]), torch.tensor(logits)[None].clone())  # type: ignore[arg-type]
    return np.asarray(processed.softmax(-1)[0].numpy())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.3),
        Sampling(2.0, top_k=7),
        Sampling(0.8, top_k=40, top_p=0.9),
        Sampling(0.8, top_k=40, top_p=0.9, min_p=0.1),
        Sampling(1.0, top_p=0.5),
        Sampling(1.0, top_p=0.95, min_p=0.02),
        Sampling(1.5, min_p=0.2),
        Sampling(0.7, top_k=2000),
        Sampling(1.0, top_k=1500, top_p=0.8),
        Sampling(0.9, top_k=20, repetition_penalty=1.8),
        Sampling(1.2, repetition_penalty=0.5),
        Sampling(1.0, top_k=10**9),
        Sampling(1.0, top_p=1e-9),
        Sampling(1.0, min_p=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [300, 3000])
def test_tokens_are_drawn_as_transformers_would(sampling: Sampling, vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(vocabulary) * 2).astype(np.float32)
    if sampling.top_p > 0.1:
        logits[[7, 9, 11]] = logits.max()  # ties at the top; which of them is the single one is not defined
    count = 20_000 if vocabulary == 300 else 5_000
    found = np.bincount(draws(logits, sampling, count), minlength=vocabulary)
    wanted = expected(logits, sampling)

    assert not found[wanted == 0].any()
    spread = np.sqrt(wanted * (1 - wanted) / count)
    assert (np.abs(found / count - wanted) <= 5.5 * spread + 4 / count).all()


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.zeros(500, np.float32)
    logits[[499, 310, 77, 280]] = 4.0
    for sampling in (Sampling(0.0), Sampling(1.0, top_p=0.0), Sampling(1.0, top_k=1)):
        assert set(draws(logits, sampling._replace(seed=9), 50)) == {77}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_a_token_all_the_same(bad: float) -> None:
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.7, 40, 0.9), Sampling(1.0, top_p=0.5), Sampling(1, 2000)):
        for logits in (np.full(3000, bad, np.float32), np.linspace(-1, 1, 3000).astype(np.float32)):
            logits[::3] = bad
            assert all(0 <= token < 3000 for token in draws(logits, sampling, 5))


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    lots = [uniform(np.uint64(seed), position) for seed in (0, 1, 2**63 - 1) for position in range(2000)]
    assert len(set(lots)) == len(lots)
    assert 0 <= min(lots) < 0.01
    assert 0.99 < max(lots) < 1
    assert abs(np.mean(lots) - 0.5) < 0.02
    assert abs(np.corrcoef(lots[:-1], lots[1:])[0, 1]) < 0.05


EDGES = [
    Sampling(temperature=0.0, top_k=0),
    Sampling(temperature=2.0, top_k=10**12),
    Sampling(temperature=1e-9, top_k=3),
    Sampling(temperature=1e-9),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.0, top_p=1.0, min_p=1.0),
    Sampling(temperature=1.0, top_p=1e-12),
    Sampling(temperature=1.0, repetition_penalty=10.0, seed=2**63 - 1),
    Sampling(temperature=1.0, repetition_penalty=1e-3),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_an_edge_value_does_not_touch_its_neighbours(edge: Sampling, load: Loader) -> None:
    model = load("gpt2", "int8", stories=8)
    neighbours = [Tale([i, i + 1], Sampling(0.9, 40, 0.95, seed=i), 12) for i in range(4)]
    alone = write(model, neighbours)
    together = write(model, [*neighbours[:2], Tale([9, 8, 7], edge, 12), *neighbours[2:]])
    assert together[:2] + together[3:] == alone
    assert all(0 <= token < model.vocab_size for token in together[2])


def test_a_story_may_fill_the_window_exactly(load: Loader) -> None:
    for family in ("gpt2", "llama_grouped"):
        model = load(family, "int8", stories=2)
        prompt = numbers(i % model.vocab_size for i in range(model.window))
        table = numbers(range(model.num_blocks))
        [token] = model.step([Chunk(prompt, 0, table, Sampling(), prompt)])
        model.step([Chunk(prompt[:-1], 0, table, None, prompt[:-1])])
        assert model.step([Chunk(prompt[-1:], model.window - 1, table, Sampling(), prompt)]) == [token]


def test_a_step_without_chunks_is_nothing(load: Loader) -> None:
    assert load("gpt2", "int8", stories=1).step([]) == []


def test_pieces_of_prompts_alone_tell_no_tokens(load: Loader) -> None:
    model = load("gpt2", "int8", stories=2)
    prompts = numbers([1, 2, 3]), numbers([4])
    chunks = [Chunk(prompt, 0, numbers([i]), None, prompt) for i, prompt in enumerate(prompts)]
    assert model.step(chunks) == [None, None]
