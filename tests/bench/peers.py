"""OpenVINO GenAI's continuous batching and this engine, in turns, in one run.

    python -m tests.bench.peers [--players 1 16 64] [--out DIR]

Needs the extra `peers`. Both write exactly 100 tokens a story, sampled from the 40 most likely, engine alone, on two
threads, from the same .gguf file: a Llama of the reference shape's size (6 layers, 384 channels, 10,000 tokens, random
weights in float16) and the packaged model. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from storyteller.checkpoint import packaged_file
from tests.bench.engine import loaded, say, write
from tests.bench.reference import PROMPT

NUM_TOKENS = 100
LAYERS, HIDDEN, INNER, VOCABULARY = 6, 384, 1024, 10_000
REPEATS = 3


def make_gguf(path: Path) -> Path:
    """A Llama of the reference shape's size, random weights, in float16, with the packaged model's first tokens."""
    source = gguf.GGUFReader(str(packaged_file()))
    writer = gguf.GGUFWriter(str(path), "llama")
    sizes = {"embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER, "context_length": 256}
    sizes |= {"attention.head_count": 6, "attention.head_count_kv": 6, "rope.dimension_count": HIDDEN // 6}
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.vocab_size", VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    fields = {name: source.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")}
    tokens = fields["tokens"][:VOCABULARY]
    known = set(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(fields["token_type"][:VOCABULARY])
    writer.add_token_merges([merge for merge in fields["merges"] if merge.replace(" ", "") in known])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    rng = np.random.default_rng(0)

    def put(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) * 0.02 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16 if len(shape) > 1 else np.float32))

    put("token_embd", VOCABULARY, HIDDEN)
    put("output_norm", HIDDEN)
    put("output", VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            put(f"blk.{i}.{name}", HIDDEN, HIDDEN)
        put(f"blk.{i}.ffn_gate", INNER, HIDDEN)
        put(f"blk.{i}.ffn_up", INNER, HIDDEN)
        put(f"blk.{i}.ffn_down", HIDDEN, INNER)
        put(f"blk.{i}.attn_norm", HIDDEN)
        put(f"blk.{i}.ffn_norm", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class OpenVINO:
    """Its continuous batching, with room for 64 stories."""

    def __init__(self, place: Path, **properties: Any) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.cache_size = 64, 512, 2
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": 2, **properties}
        self._pipe = self._genai.ContinuousBatchingPipeline(str(place), scheduler, "CPU", properties)

    def write(self, players: int, prompt: str) -> float:
        """Tokens a second."""
        wish = self._genai.GenerationConfig()
        wish.max_new_tokens, wish.ignore_eos = NUM_TOKENS, True
        wish.do_sample, wish.top_k, wish.temperature, wish.apply_chat_template = True, 40, 0.8, False
        start = time.perf_counter()
        told = self._pipe.generate([f"{prompt} {i}" for i in range(players)], [wish] * players)
        seconds = time.perf_counter() - start
        if len(told) != players:
            raise RuntimeError(f"expected {players} stories, got {len(told)}")
        return players * NUM_TOKENS / seconds


def compare(name: str, ours: Any, peers: dict[str, OpenVINO], players: int, prompt: list[int], text: str) -> list[Any]:
    """All in turns; the best of each."""
    rates: dict[str, float] = {}
    for _ in range(REPEATS):
        found = write(ours, "continuous", [NUM_TOKENS] * players, prompt)["tokens_per_second"]
        rates["this engine, int8"] = max(rates.get("this engine, int8", 0), found)
        for way, peer in peers.items():
            rates[way] = max(rates.get(way, 0), peer.write(players, text))
    rows = [{"model": name, "players": players, "way": way, "tokens_per_second": rate} for way, rate in rates.items()]
    for row in rows:
        say(f"{name:>9} {players:>3} {row['way']:<28} {row['tokens_per_second']:>8.0f} tokens/s")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--players", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    options = parser.parse_args()
    text = "once upon a time there was"
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        place = make_gguf(Path(folder) / "reference.gguf")
        peers = {"OpenVINO GenAI": OpenVINO(place)}
        ours = loaded(str(place), "int8", Path(folder), 64 * 256)
        for players in options.players:
            rows += compare("reference", ours, peers, players, PROMPT, text)
    ours = loaded("", "int8", options.cache, 64 * 320)
    prompt = ours.tokenizer(text)["input_ids"]
    peers = {"OpenVINO GenAI": OpenVINO(packaged_file())}
    for players in options.players:
        rows += compare("packaged", ours, peers, players, prompt, text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
