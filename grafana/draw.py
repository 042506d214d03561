"""Draws the dashboard's main panels from what a Prometheus kept, without Grafana, for docs/.

    python -m grafana.draw http://127.0.0.1:9090 START END docs/images/dashboard.png

START and END are seconds since 1970. A panel that finds nothing is drawn all the same, and named on stdout.
"""

from __future__ import annotations

import json
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

BOARD = Path(__file__).parent / "dashboards/campfire.json"
MAIN = (
    "How long until the first text?", "How long between two texts?", "First text, as players saw it",
    "How many asks wait?", "How old is the oldest?", "How wrong was the promised wait?",
    "How full are the steps?", "How long does a step take?", "How many tokens a second?",
    "Is there KV memory left?", "Who computes?", "Is a gateway's event loop late?",
)  # fmt: skip
COLUMNS = 3
Series = tuple[dict[str, str], list[tuple[float, float]]]


def ask(url: str, expr: str, start: float, end: float) -> list[Series]:
    step = max(1, round((end - start) / 300))
    expr = expr.replace("$__rate_interval", f"{max(10, 4 * step)}s").replace("$job", ".+").replace("$instance", ".+")
    arguments = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{arguments}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [(one["metric"], [(float(at) - start, float(value)) for at, value in one["values"]]) for one in found]


def legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def draw_lines(axes: Axes, panel: dict[str, Any], found: list[list[Series]]) -> None:
    for target, series in zip(panel["targets"], found, strict=True):
        for labels, points in series:
            at, values = zip(*points, strict=True)
            axes.plot(at, values, linewidth=1.2, label=legend(target["legendFormat"], labels))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(
        {"s": "seconds", "bytes": "bytes", "percentunit": "share"}.get(panel["fieldConfig"]["defaults"]["unit"], "")
    )
    axes.legend(fontsize=6, frameon=False, loc="best", ncols=2)


def draw_heatmap(axes: Axes, found: list[list[Series]]) -> None:
    """Prometheus' buckets contain all smaller ones; a cell is what one has more than the one below."""
    buckets = sorted((float(labels["le"]), dict(points)) for labels, points in found[0])
    at = sorted({moment for _, points in buckets for moment in points})
    heights = np.array([[points.get(moment, 0.0) for moment in at] for _, points in buckets])
    cells = np.diff(heights, axis=0, prepend=0).clip(min=0)
    edges = np.arange(len(buckets) + 1)
    axes.pcolormesh([*at, at[-1] + 1], edges, cells, cmap="Oranges")
    axes.set_yticks(edges[:-1] + 0.5, [f"≤ {le:g}" for le, _ in buckets], fontsize=6)


def main(url: str, start: float, end: float, path: Path) -> None:
    panels = {panel["title"]: panel for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]}
    rows = -(-len(MAIN) // COLUMNS)
    figure, places = plt.subplots(rows, COLUMNS, figsize=(15, 2.9 * rows), layout="constrained")
    for title, axes in zip(MAIN, places.flat, strict=True):
        found = [ask(url, target["expr"], start, end) for target in panels[title]["targets"]]
        axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if not any(found):
            sys.stdout.write(f"empty: {title}\n")
        elif panels[title]["type"] == "heatmap":
            draw_heatmap(axes, found)
        else:
            draw_lines(axes, panels[title], found)
    for axes in places[-1]:
        axes.set_xlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
