"""The table that people read at the end: one line a crowd, then what went wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
WIDTH = 150
"""Columns where the output is no terminal."""
LATE_MS = 50
"""Bots that are later than this add too much of their own to what they measure."""


def console(file: IO[str]) -> Console:
    return Console(file=file, highlight=False, width=None if file.isatty() else WIDTH)


def show(rows: Sequence[Row], file: IO[str]) -> None:
    screen = console(file)
    screen.print(table(rows))
    for row in rows:
        for line in remarks(row):
            screen.print(line, soft_wrap=True)


def table(rows: Sequence[Row]) -> Table:
    result = Table(box=None, pad_edge=False, header_style="bold")
    named = any(row.get("name") for row in rows)
    rated = any(row.get("rate") for row in rows)
    for heading in (["crowd"] if named else []) + ["players"] + (["asks/s"] if rated else []):
        result.add_column(heading, justify="left" if heading == "crowd" else "right", no_wrap=True)
    for heading in (
        "stories", "tokens/s", "first text ms\np50 / p95 / p99", "gap ms\np50 / p95 / p99",
        "story s\np50 / p95 / p99", "goodput/s", "errors", "lost", "repeated", "broken", "resumed", "cancelled",
    ):  # fmt: skip
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        bad = row["broken_stories"] or row["lost_frames"] or row["repeated_frames"]
        result.add_row(
            *([row.get("name", "")] if named else []),
            str(row["players"]),
            *([f"{row['rate']:.3g}" if row.get("rate") else "-"] if rated else []),
            str(row["stories"]),
            f"{row['tokens_per_second']:.1f}",
            spread(row["first_text_ms"]),
            spread(row["text_gap_ms"]),
            spread(row["story_s"], digits=2),
            f"{row['goodput']:.2f}",
            str(sum(row["errors"].values())),
            *(str(row[name]) for name in ("lost_frames", "repeated_frames", "broken_stories", "resumed", "cancelled")),
            style="red" if bad else None,
        )
    return result


def spread(percentiles: dict[str, float | None], digits: int = 0) -> str:
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in percentiles.values())


def remarks(row: Row) -> list[str]:
    """What the table has no room for."""
    crowd = f"{row['players']} player{'s' if row['players'] != 1 else ''}"
    if row.get("rate"):
        crowd += f" at {row['rate']:.3g} asks/s"
    if row.get("name"):
        crowd = f"{row['name']}, {crowd}"
    lines = []
    if row["errors"]:
        lines.append(f"{crowd}: errors: " + ", ".join(f"{code} {count}" for code, count in row["errors"].items()))
    lines += [f"{crowd}: broken: {fault} ({count})" for fault, count in row.get("faults", {}).items()]
    if row.get("slo"):
        kept = row["slo_kept"]
        share = "nobody to judge" if kept is None else f"kept by {kept:.1%} of the stories"
        lines.append(f"{crowd}: SLO {row['slo']}: {share}, {'missed' if row['slo_missed'] else 'fine'}")
    lines += [f"{crowd}: counts differ: {difference}" for difference in row.get("differences") or ()]
    if row.get("interrupted"):
        lines.append(f"{crowd}: interrupted with {row['unfinished']} stories unfinished")
    late = row["bots"]["late_ms"]["p99"] if row.get("bots") else None
    if late and late > LATE_MS:
        lines.append(
            f"{crowd}: the bots themselves woke {late:.0f} ms late (p99): a busy machine, or too few --processes"
        )
    return lines
