"""Kinds of panels and pieces of PromQL, as plain Grafana JSON.

Every query follows the `job` and `instance` that are chosen at the top of the dashboard.
"""

from __future__ import annotations

from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Panel = dict[str, Any]


def series(metric: str, *matchers: str) -> str:
    """A metric of the jobs and instances that were chosen."""
    matchers = ('job=~"$job"', 'instance=~"$instance"', *matchers)
    return f"{metric}{{{', '.join(matchers)}}}"


def rate(metric: str, *matchers: str) -> str:
    return f"rate({series(metric, *matchers)}[$__rate_interval])"


def quantile(share: float, histogram: str) -> str:
    """Over all replicas: their buckets are added first."""
    return f"histogram_quantile({share}, sum by (le) ({rate(histogram + '_bucket')}))"


def quantiles(histogram: str) -> dict[str, str]:
    return {f"p{round(share * 100)}": quantile(share, histogram) for share in (0.5, 0.95, 0.99)}


def query(expr: str, legend: str, **more: Any) -> dict[str, Any]:
    return {"datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True, **more}


def panel(kind: str, title: str, description: str, unit: str, queries: dict[str, str], **more: Any) -> Panel:
    """One panel. `queries` maps what the legend says to what Prometheus is asked."""
    targets = [query(expr, legend) | {"refId": chr(ord("A") + n)} for n, (legend, expr) in enumerate(queries.items())]
    field = {"unit": unit, "custom": more.pop("custom", {}), **more.pop("field", {})}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": field, "overrides": []},
        **more,
    }


def graph(title: str, description: str, unit: str, queries: dict[str, str], *, stacked: bool = False) -> Panel:
    look = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if stacked else 8, "showPoints": "never"}
    return panel(
        "timeseries",
        title,
        description,
        unit,
        queries,
        custom=look | ({"stacking": {"mode": "normal", "group": "A"}} if stacked else {}),
        field={"min": 0},
        options={
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def number(title: str, description: str, unit: str, expr: str, good: list[tuple[float | None, str]]) -> Panel:
    """One figure; `good` gives the colour from each value up."""
    return panel(
        "stat",
        title,
        description,
        unit,
        {title: expr},
        field={
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": at, "color": colour} for at, colour in good],
            }
        },
        options={"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
    )


def heatmap(title: str, description: str, unit: str, histogram: str) -> Panel:
    drawn = panel(
        "heatmap",
        title,
        description,
        unit,
        {"{{le}}": f"sum by (le) (increase({series(histogram + '_bucket')}[$__rate_interval]))"},
        options={
            "calculate": False,
            "yAxis": {"axisPlacement": "left", "unit": unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "cellGap": 1,
            "tooltip": {"mode": "single", "yHistogram": True},
        },
    )
    drawn["targets"][0]["format"] = "heatmap"
    return drawn


def table(title: str, description: str, unit: str, expr: str, hidden: tuple[str, ...]) -> Panel:
    drawn = panel(
        "table",
        title,
        description,
        unit,
        {title: expr},
        transformations=[{"id": "organize", "options": {"excludeByName": dict.fromkeys(hidden, True)}}],
    )
    drawn["targets"][0] |= {"format": "table", "instant": True, "range": False}
    return drawn
