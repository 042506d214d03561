"""transformers' own greedy `generate` is the oracle: in float32 the same stories, however they meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from storyteller.story import Chunk, Sampling, numbers
from tests.checkpoints import FAMILIES, TEXT, Family
from tests.engine.conftest import Loader
from tests.engine.writing import Tale, write

LENGTHS = (1, 7, 16, 17, 40)
NUM_TOKENS = 40


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(TEXT)["input_ids"]
    return [ids[i : i + length] for i, length in enumerate(LENGTHS)]


def generated(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    told = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, **settings,
        )  # fmt: skip
        told.append(out[0, len(prompt) :].tolist())
    return told


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_stories_are_those_of_transformers(
    family: Family, checkpoints: dict[Family, Path], load: Loader
) -> None:
    prompts = prompts_of(checkpoints[family])
    expected = generated(checkpoints[family], prompts)
    model = load(family)

    alone = [write(model, [Tale(prompt, Sampling(), NUM_TOKENS)])[0] for prompt in prompts]
    together = write(model, [Tale(prompt, Sampling(), NUM_TOKENS) for prompt in prompts])
    joining = write(model, [Tale(prompt, Sampling(), NUM_TOKENS, joins=9 * i) for i, prompt in enumerate(prompts)])
    in_pieces = write(
        model, [Tale(prompt, Sampling(), NUM_TOKENS, piece=1 + 4 * i) for i, prompt in enumerate(prompts)]
    )

    assert alone == expected
    assert together == expected
    assert joining == expected
    assert in_pieces == expected


def test_repetition_penalty_is_that_of_transformers(checkpoints: dict[Family, Path], load: Loader) -> None:
    prompts = prompts_of(checkpoints["gpt2"])
    expected = generated(checkpoints["gpt2"], prompts, repetition_penalty=1.4)

    told = write(load("gpt2"), [Tale(p, Sampling(repetition_penalty=1.4), NUM_TOKENS) for p in prompts])

    assert told == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_logits_follow_those_of_transformers(
    family: Family, checkpoints: dict[Family, Path], load: Loader
) -> None:
    """Greedy text of chaotic random weights differs with the last bit; the distribution stays near."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoints[family]), dtype=torch.float32)
    prompt = prompts_of(checkpoints[family])[-1]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1].numpy()
    model = load(family, "int8")
    model.step([Chunk(numbers(prompt), 0, numbers(range(16)), Sampling(), numbers(prompt))])
    logits = model._workers[0]._logits[: model.vocab_size]
    assert np.corrcoef(logits, expected)[0, 1] > 0.97
