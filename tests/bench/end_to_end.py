"""The whole stack under the bots, on this machine: real processes, Redis between them, every word checked.

    python -m tests.bench.end_to_end --out DIR [--players 1 16 64]

Once with the reference shape (random weights, a real tokenizer of its size, so that text flows as it does for players)
and once with the packaged model. Writes end_to_end.json; the last line on stdout is the same JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.bench.reference import make_reference
from tests.processes import ROOT, free_port, stack, wait_until

VOCABULARY = 10_000
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.end_to_end")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for end_to_end.json")
    parser.add_argument("--players", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--stories", type=int, default=10, help="stories of each player")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reference = make_reference(folder / "reference", 256)
        give_words(reference)
        for name, model in (("reference", reference), ("packaged", "")):
            (folder / name).mkdir(exist_ok=True)
            found[name] = crowd(model, options.players, options.stories, folder / name)
            show(name, found[name])
    text = json.dumps(found)
    (options.out / "end_to_end.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


def give_words(folder: Path) -> None:
    """Puts a tokenizer of the reference's whole vocabulary into its folder, trained on made-up words."""
    chance = random.Random(0)
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    words = {"".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(40_000)}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(sorted(words))], trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>"
    )
    fast.save_pretrained(str(folder))


def crowd(model: Path | str, players: Sequence[int], stories: int, folder: Path) -> list[dict[str, Any]]:
    """One row of the bots for each number of players, with the memory of the storyteller beside it, in MiB."""
    rows_file = folder / "rows.json"
    rows: list[dict[str, Any]] = []
    with stack(folder, model) as running:
        gateway, storyteller = running.gateway(), running.storyteller()
        wait_until(gateway.is_ready, "a ready gateway")
        for count in players:
            command = [sys.executable, "-m", "loadbots", "--url", gateway.url, "--players", str(count)]
            command += ["--stories", str(stories), "--max-tokens", "100", "--ignore-end", "--out", str(rows_file)]
            env = {**os.environ, "LOADBOTS_METRICS_PORT": str(free_port())}
            with console.status(f"{count} players"):
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600, env=env)
            (row,) = json.loads(rows_file.read_text())
            wanted = ("players", "stories", "tokens_per_second", "first_text_ms", "text_gap_ms", "story_s")
            checked = ("lost_frames", "repeated_frames", "broken_stories")
            rows.append({name: row[name] for name in (*wanted, *checked)})
            rows[-1]["storyteller_mib"] = round(psutil.Process(storyteller.process.pid).memory_info().rss / 2**20)
    return rows


def show(name: str, rows: list[dict[str, Any]]) -> None:
    table = Table(
        "players", "tokens/s", "first text p50 ms", "p95", "story p50 s", "broken", "storyteller MiB", title=name
    )
    for row in rows:
        first, story = row["first_text_ms"], row["story_s"]
        cells = (row["players"], round(row["tokens_per_second"]), round(first["p50"]), round(first["p95"]))
        table.add_row(*map(str, (*cells, round(story["p50"], 2), row["broken_stories"], row["storyteller_mib"])))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
