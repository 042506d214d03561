"""What the engine is measured against: the reference shape, and transformers' own ways of writing it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import make_tokenizer

PROMPT = list(range(8))
LIMIT_S = 60
"""The longest that one batch of transformers may take."""


def make_reference(folder: Path, window: int) -> Path:
    """The reference shape: GPT-2, 6 layers, 384 channels, 6 heads, 10,000 tokens, random weights."""
    folder.mkdir(parents=True)
    make_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=10_000, n_positions=window, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(str(folder))
    return folder


class Transformers:
    """The classic ways, in float32: `generate` for one, and a static batch with left padding, mask and positions."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)

    def generate(self, length: int, threads: int) -> float:
        """Tokens a second of one story, sampled from the 40 most likely."""
        torch.set_num_threads(threads)
        start = time.perf_counter()
        self._model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), do_sample=True,
            top_k=40, temperature=0.8, max_new_tokens=length, min_new_tokens=length, pad_token_id=0,
        )  # fmt: skip
        return length / (time.perf_counter() - start)

    @torch.inference_mode()
    def static_batch(self, lengths: Sequence[int], threads: int) -> dict[str, float]:
        """One batch, every row to the longest length; useful tokens a second, and the seconds of the whole.

        A batch that takes longer than `LIMIT_S` is cut there, in its favour: its later steps would be slower still.
        """
        torch.set_num_threads(threads)
        rows, longest = len(lengths), max(lengths)
        pads = torch.tensor([i % 4 for i in range(rows)])  # prompts differ a little in length
        width = len(PROMPT) + 3
        ids = torch.zeros(rows, width, dtype=torch.long)
        mask = (torch.arange(width)[None] >= pads[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = transformers.DynamicCache()
        start = time.perf_counter()
        steps = 0
        while steps < longest and time.perf_counter() - start < LIMIT_S:
            steps += 1
            out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
            logits = out.logits[:, -1] / 0.8
            best, places = logits.topk(40)
            ids = places.gather(1, torch.multinomial(best.softmax(-1), 1))
            mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
            positions = positions[:, -1:] + 1
        seconds = time.perf_counter() - start
        useful = sum(min(length, steps) for length in lengths)
        return {"tokens_per_second": useful / seconds, "seconds": seconds, "share_of_steps": steps / longest}
