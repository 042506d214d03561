"""Tiny checkpoints with random weights and a real tokenizer, written to a folder in a second, for any test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Family = Literal["gpt2", "gpt_neox", "gpt_neox_sequential", "llama", "llama_grouped", "llama_untied"]
FAMILIES: tuple[Family, ...] = (
    "gpt2", "gpt_neox", "gpt_neox_sequential", "llama", "llama_grouped", "llama_untied"
)  # fmt: skip
LONG_WINDOW = 131_072
FOR_EVER = 130_000
"""Tokens of a story that goes on for longer than any test, in a model with such a window."""

TEXT = (
    "Once upon a time there was a dragon who lived in a castle on a hill. A brave girl came up the road and said: "
    "good evening, dragon! The dragon laughed, and the lamps in the hall grew bright. Über den Wolken flog ein Stern."
)


def make_tokenizer(folder: Path, chat_template: str | None = None) -> int:
    """A byte-level BPE tokenizer, trained on a few words; the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    kind: Any = PreTrainedTokenizerFast
    fast = kind(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return len(fast)


def _config(family: Family, vocabulary: int, window: int) -> Any:
    import transformers

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=window, n_embd=48, n_layer=2, n_head=4, **ends
        )
    if family.startswith("gpt_neox"):
        return transformers.GPTNeoXConfig(
            vocab_size=vocabulary, max_position_embeddings=window, hidden_size=64, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=96, use_parallel_residual=family == "gpt_neox",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, **ends,
        )  # fmt: skip
    # heads of 16, 32 and 112 numbers: whole vectors of every kind, and what is left over
    hidden, heads, kv_heads = {"llama_grouped": (64, 4, 2), "llama_untied": (224, 2, 2)}.get(family, (64, 2, 2))
    return transformers.LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=window, hidden_size=hidden, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=112,
        tie_word_embeddings=family != "llama_untied", **ends,
    )  # fmt: skip


def make_checkpoint(
    folder: Path, family: Family = "gpt2", window: int = 256, chat_template: str | None = None, seed: int = 0
) -> Path:
    """A checkpoint of random weights in `folder`, loadable by transformers; the folder."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = _config(family, make_tokenizer(folder, chat_template), window)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weights in model.named_parameters():
            # wide enough that greedy text is not one word over and over, and that no bias or norm is neutral
            width = 0.15 if "wte" in name or "embed" in name else 0.4
            weights.copy_(torch.randn_like(weights) * width + (1.0 if "norm" in name or "ln_" in name else 0.0))
    model.save_pretrained(str(folder))
    return folder
