"""What the players may expect (SLO): bounds on one story, and the share of stories that must keep them.

`first_text` is the wait for the first text, `text_gap` the longest pause inside the story, `story` the whole; each in
`ms` or `s`. A story that was refused, failed or broken keeps no bound. A story that the bots cancelled is not judged.
"""

from __future__ import annotations

import re

import msgspec

BOUNDS = ("first_text", "text_gap", "story")


class Slo(msgspec.Struct, frozen=True):
    """Bounds in seconds; None: not asked for."""

    first_text: float | None = None
    text_gap: float | None = None
    story: float | None = None

    def keeps(self, first_text: float | None, longest_gap: float, story: float | None) -> bool:
        """Whether one story that was told to its end kept every bound."""
        return (
            _within(first_text, self.first_text) and _within(longest_gap, self.text_gap) and _within(story, self.story)
        )

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in BOUNDS)
        return ",".join(f"{name}={bound:g}s" for name, bound in given if bound is not None)


def _within(measured: float | None, bound: float | None) -> bool:
    return bound is None or (measured is not None and measured <= bound)


def parse_slo(text: str) -> Slo:
    """`first_text=1s,story=10s`; `ValueError` says what was expected."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, bound = part.strip().partition("=")
        if name not in BOUNDS:
            raise ValueError(f"expected one of {', '.join(BOUNDS)}, got {name!r}")
        bounds[name] = parse_seconds(bound)
    return Slo(**bounds)


def parse_seconds(text: str) -> float:
    """`250ms`, `1.5s` or `2` (seconds), above zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|)", text.strip())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"expected a time such as 500ms or 2s, got {text!r}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
