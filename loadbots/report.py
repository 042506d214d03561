"""The results as one HTML page: self-contained, without outside requests, light or dark as the reader's system is.

Everything is drawn from rows alone, so a report of earlier results (`--compare`) is the same page. Pictures are
plotly's; this module says which there are, what is on which axis, and how the page around them looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
import plotly.offline

from loadbots.table import remarks, spread

Row = dict[str, Any]
COLOURS = ("#4c8dff", "#f2994a", "#2fb67c", "#d65db1", "#c9a227", "#16a3b8", "#e05252", "#8e7cf0")
DASHES = {"p50": "solid", "p95": "dash", "p99": "dot"}
CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}
DISTRIBUTIONS = (
    ("first_text_ms", "First text", "ms from the moment of asking"),
    ("text_gap_ms", "Gap between texts", "ms"),
    ("story_s", "Whole story", "s"),
)


def page(rows: Sequence[Row]) -> str:
    """The whole document."""
    if _by_rate(rows):
        rows = sorted(rows, key=_load)  # a knee search jumps to and fro
    sections = [_section("Results", _table(rows) + _notes(rows))]
    sections += [
        _section(title, "".join(_picture(figure) for figure in figures), note)
        for title, note, figures in _pictures(rows)
        if figures
    ]
    template = (files("loadbots") / "report.html").read_text(encoding="utf-8")
    parts = {
        "{{cards}}": "".join(_card(*card) for card in _cards(rows)),
        "{{sections}}": "".join(sections),
        "{{title}}": escape(" · ".join(dict.fromkeys(_name(row) for row in rows)) or "no crowd"),
        "{{plotly}}": plotly.offline.get_plotlyjs(),
    }
    for mark, part in parts.items():
        template = template.replace(mark, part)
    return template


def _pictures(rows: Sequence[Row]) -> list[tuple[str, str, list[go.Figure]]]:
    crowds = len({_load(row) for row in rows})
    against = "asks a second" if _by_rate(rows) else "players"
    load = [_waits(rows, against), _throughput(rows, against)] if crowds > 1 or _names(rows) > 1 else []
    spreads = [_distribution(rows, *kind) for kind in DISTRIBUTIONS if any(_bars(row, kind[0]) for row in rows)]
    timed = [row for row in rows if row.get("timeline", {}).get("s")]
    times = [
        _over_time(timed, "tokens_per_second", "Tokens a second"),
        _over_time(timed, "in_flight", "Asks in flight"),
    ]
    return [
        ("Against load", f"Each point is one crowd; to the right are more {against}.", load),
        ("How long players waited", "Share of all samples at or below a time.", spreads),
        ("Over time", "Seconds since the first ask of the crowd.", times if timed else []),
    ]


def _name(row: Row) -> str:
    return str(row.get("name") or row.get("server") or "crowd")


def _names(rows: Sequence[Row]) -> int:
    return len({_name(row) for row in rows})


def _by_rate(rows: Sequence[Row]) -> bool:
    return bool(rows) and all(row.get("rate") for row in rows)


def _load(row: Row) -> float:
    return float(row.get("rate") or row["players"])


def _label(rows: Sequence[Row], row: Row) -> str:
    players = f"{row['players']} player{'s' if row['players'] != 1 else ''}"
    load = f"{row['rate']:.3g} asks/s" if row.get("rate") else players
    return f"{_name(row)}, {load}" if _names(rows) > 1 else load


def _by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    named: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_load):
        named.setdefault(_name(row), []).append(row)
    return named


def _figure(title: str, x: str, y: str, *, log_x: bool = False) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}, "x": 0, "xref": "paper", "y": 0.97, "yanchor": "top"},
        template="none", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="x unified",
        height=360, margin={"l": 60, "r": 16, "t": 48, "b": 96}, colorway=COLOURS, font={"size": 12.5},
        legend={"orientation": "h", "y": -0.24, "x": 0, "yanchor": "top"},
        xaxis={"title": {"text": x, "standoff": 8}, "zeroline": False, "type": "log" if log_x else "linear"},
        yaxis={"title": {"text": y, "standoff": 8}, "rangemode": "tozero", "zeroline": False},
    )  # fmt: skip
    return figure


def _waits(rows: Sequence[Row], against: str) -> go.Figure:
    """Time to first text against load."""
    figure = _figure("Time to first text", against, "ms")
    for colour, (name, line) in zip(_cycle(rows), _by_name(rows).items(), strict=False):
        for share, dash in DASHES.items():
            figure.add_scatter(
                x=[f"{_load(row):.4g}" for row in line],
                y=[row["first_text_ms"][share] for row in line],
                name=f"{name} {share}" if _names(rows) > 1 else share,
                mode="lines+markers",
                line={"dash": dash, "color": colour, "width": 2},
            )
    return _categories(figure, rows)


def _throughput(rows: Sequence[Row], against: str) -> go.Figure:
    figure = _figure("Throughput", against, "tokens a second")
    for colour, (name, line) in zip(_cycle(rows), _by_name(rows).items(), strict=False):
        figure.add_bar(
            x=[f"{_load(row):.4g}" for row in line],
            y=[row["tokens_per_second"] for row in line],
            name=name,
            marker_color=colour,
            text=[f"{row['tokens_per_second']:.0f}" for row in line],
            textposition="outside",
            cliponaxis=False,
        )
    figure.update_layout(barmode="group", showlegend=_names(rows) > 1, bargap=0.35)
    return _categories(figure, rows)


def _categories(figure: go.Figure, rows: Sequence[Row]) -> go.Figure:
    """Crowds stand side by side, however far apart their numbers are."""
    order = [f"{load:.4g}" for load in sorted({_load(row) for row in rows})]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)


def _bars(row: Row, kind: str) -> list[list[float]]:
    found: list[list[float]] = row.get("histograms", {}).get(kind, [])
    return found


def _distribution(rows: Sequence[Row], kind: str, title: str, unit: str) -> go.Figure:
    """Cumulative, so that any percentile can be read off."""
    figure = _figure(title, unit, "share of samples", log_x=True)
    for colour, row in zip(_cycle(rows), rows, strict=False):
        bars = _bars(row, kind)
        counted = list(accumulate(count for _, count in bars))
        if not bars:
            continue
        figure.add_scatter(
            x=[bars[0][0], *(edge for edge, _ in bars)],
            y=[0, *(count / counted[-1] for count in counted)],
            name=_label(rows, row),
            mode="lines",
            line={"shape": "hv", "color": colour, "width": 2},
        )
    edges = [edge for row in rows for edge, _ in _bars(row, kind)]
    figure.update_xaxes(tickvals=_ticks(min(edges), max(edges)))
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%", dtick=0.25)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis, as many as have room."""
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if decades < 3 else (1,)
    if decades < 1:
        steps = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [round(step * 10.0**exponent, 9) for exponent in exponents for step in steps]


def _over_time(rows: Sequence[Row], kind: str, title: str) -> go.Figure:
    figure = _figure(title, "s", "")
    for colour, row in zip(_cycle(rows), rows, strict=False):
        figure.add_scatter(
            x=row["timeline"]["s"],
            y=row["timeline"][kind],
            name=_label(rows, row),
            mode="lines",
            line={"color": colour, "width": 1.8, "shape": "hv" if kind == "in_flight" else "linear"},
        )
    return figure


def _cycle(rows: Sequence[Row]) -> Sequence[str]:
    return COLOURS * (len(rows) // len(COLOURS) + 1)


def _picture(figure: go.Figure) -> str:
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
    return f'<figure class="picture">{drawn}</figure>'


def _section(title: str, content: str, note: str = "") -> str:
    return f"<section><h2>{title}</h2>{f'<p>{note}</p>' if note else ''}<div class='row'>{content}</div></section>"


def _cards(rows: Sequence[Row]) -> list[tuple[str, str, bool]]:
    """Number, what it counts, whether it is bad."""
    told = sum(row["stories"] for row in rows)
    bad = {name: sum(row[name] for row in rows) for name in ("broken_stories", "lost_frames", "repeated_frames")}
    best = max((row["tokens_per_second"] for row in rows), default=0.0)
    return [
        (f"{told:,}", "stories told", told == 0),
        (f"{best:,.0f}", "tokens a second, best crowd", False),
        *((f"{count:,}", name.replace("_", " "), count > 0) for name, count in bad.items()),
        (f"{sum(sum(row['errors'].values()) for row in rows):,}", "errors and refusals", False),
        (f"{sum(row['resumed'] for row in rows):,}", "resumed", False),
    ]


def _card(number: str, what: str, bad: bool) -> str:
    return f'<div class="card{" bad" if bad else ""}"><b>{number}</b><span>{escape(what)}</span></div>'


def _table(rows: Sequence[Row]) -> str:
    heads = (
        "crowd", "stories", "tokens/s", "first text ms<br>p50 / p95 / p99", "gap ms<br>p50 / p95 / p99",
        "story s<br>p50 / p95 / p99", "goodput/s", "errors", "lost", "repeated", "broken", "resumed", "cancelled",
    )  # fmt: skip
    body = ""
    for row in rows:
        bad = row["broken_stories"] or row["lost_frames"] or row["repeated_frames"] or row.get("slo_missed")
        cells = (
            escape(_label(rows, row)), row["stories"], f"{row['tokens_per_second']:.1f}",
            spread(row["first_text_ms"]), spread(row["text_gap_ms"]), spread(row["story_s"], 2),
            f"{row['goodput']:.2f}", sum(row["errors"].values()), row["lost_frames"], row["repeated_frames"],
            row["broken_stories"], row["resumed"], row["cancelled"],
        )  # fmt: skip
        body += f"<tr{' class=bad' if bad else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<div class='table'><table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{body}</table></div>"


def _notes(rows: Sequence[Row]) -> str:
    lines = [line for row in rows for line in remarks(row)]
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
