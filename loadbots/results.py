"""Reading `rows.json` files of earlier runs, for `--compare`: every row gets its file's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

NEEDED = (
    "players", "stories", "errors", "tokens_per_second", "first_text_ms", "text_gap_ms", "story_s", "goodput",
    "lost_frames", "repeated_frames", "broken_stories", "resumed", "cancelled",
)  # fmt: skip


class UnreadableError(Exception):
    """One line for a person."""


def read_results(paths: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for path in paths:
        for row in _read(path):
            missing = [name for name in NEEDED if name not in row]
            if missing:
                raise UnreadableError(f"{path}: expected rows with {', '.join(missing)}")
            rows.append({**row, "name": Path(path).stem})
    return rows


def _read(path: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[dict[str, Any]])
    except OSError as failed:
        raise UnreadableError(f"{path}: cannot be read: {failed.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise UnreadableError(f"{path}: expected a list of rows as --out writes it: {wrong}") from None
