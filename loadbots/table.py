"""The table that people read at the end: one line a crowd, then what went wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

Row = dict[str, Any]
WIDTH = 200
"""Columns where the output is no terminal."""
LATE_MS = 50
"""Bots that are later than this add too much of their own to what they measure."""


def console(file: IO[str]) -> Console:
    return Console(file=file, highlight=False, width=None if file.isatty() else WIDTH)


def show(rows: Sequence[Row], file: IO[str]) -> None:
    screen = console(file)
    shown = table(rows)
    if _width(screen, shown) > screen.width:
        shown = table(rows, standing=True)
        screen.width = max(screen.width, _width(screen, shown))  # rather wrapped than cut
    screen.print(shown)
    for row in rows:
        for line in remarks(row):
            screen.print(line, soft_wrap=True)


def _width(screen: Console, shown: Table) -> int:
    return Measurement.get(screen, screen.options.update(max_width=10_000), shown).maximum


def table(rows: Sequence[Row], *, standing: bool = False) -> Table:
    """A line for each crowd, or `standing` a column for each, for narrow terminals."""
    columns = _columns(rows)
    styles = ["red" if row["broken_stories"] or row["lost_frames"] or row["repeated_frames"] else "" for row in rows]
    result = Table(box=None, pad_edge=False, header_style="bold", show_header=not standing)
    if standing:
        result.add_column(style="bold", no_wrap=True)
        for style in styles:
            result.add_column(justify="right", style=style, no_wrap=True)
        for heading, cells in columns.items():
            result.add_row(heading.partition("\n")[0], *cells)
        return result
    for heading in columns:
        result.add_column(heading, justify="left" if heading == "crowd" else "right", no_wrap=True)
    for line, style in zip(zip(*columns.values(), strict=True), styles, strict=True):
        result.add_row(*line, style=style)
    return result


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Cells by heading; those that no row has are left out."""
    columns: dict[str, list[str]] = {}
    if any(row.get("name") for row in rows):
        columns["crowd"] = [str(row.get("name", "")) for row in rows]
    columns["players"] = [str(row["players"]) for row in rows]
    if any(row.get("rate") for row in rows):
        columns["asks/s"] = [f"{row['rate']:.3g}" if row.get("rate") else "-" for row in rows]
    columns["stories"] = [str(row["stories"]) for row in rows]
    columns["tokens/s"] = [f"{row['tokens_per_second']:.1f}" for row in rows]
    for heading, name, digits in (("first text ms", "first_text_ms", 0), ("gap ms", "text_gap_ms", 0),
                                  ("story s", "story_s", 2)):  # fmt: skip
        columns[f"{heading}\np50 / p95 / p99"] = [spread(row[name], digits) for row in rows]
    columns["goodput/s"] = [f"{row['goodput']:.2f}" for row in rows]
    columns["errors"] = [str(sum(row["errors"].values())) for row in rows]
    for heading, name in (("lost", "lost_frames"), ("repeated", "repeated_frames"), ("broken", "broken_stories"),
                          ("resumed", "resumed"), ("cancelled", "cancelled")):  # fmt: skip
        columns[heading] = [str(row[name]) for row in rows]
    return columns


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
