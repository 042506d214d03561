"""Makes the Grafana dashboard: `python -m grafana.generate` writes grafana/dashboards/campfire.json.

`python -m grafana.generate --check` only says whether the file is what this program makes (a test does so).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grafana.panels import DATASOURCE, Panel
from grafana.questions import ROWS

HERE = Path(__file__).parent
COLUMNS = 24


def laid_out() -> list[Panel]:
    """All panels under their rows: figures four in a line, everything else as many as fit, at most three."""
    panels: list[Panel] = []
    y = 0
    for title, make in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        x, y, line = 0, y + 1, 0
        for drawn in make():
            width, height = (6, 4) if drawn["type"] == "stat" else (8, 8)
            if x + width > COLUMNS or (line and height != line):
                x, y = 0, y + line
            drawn["gridPos"] = {"x": x, "y": y, "w": width, "h": height}
            x, line = x + width, height
            panels.append(drawn)
        y += line
    for number_of, drawn in enumerate(panels, start=1):
        drawn["id"] = number_of
    return panels


def chosen(name: str, label: str, values: str) -> dict[str, Any]:
    """A choice at the top of the dashboard: any number of values, at first all."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": values,
        "query": {"query": values, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "campfire",
        "title": "Campfire",
        "description": "Are players served, is a queue building, is the batch full, and the machine?",
        "tags": ["campfire"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                source | {"current": {"text": "Prometheus", "value": "prometheus"}},
                chosen("job", "Job", "label_values(up, job)"),
                chosen("instance", "Instance", 'label_values(up{job=~"$job"}, instance)'),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": DATASOURCE,
                    "enable": True,
                    "iconColor": "red",
                    "expr": 'ALERTS{alertstate="firing"}',
                    "titleFormat": "{{alertname}}",
                }
            ]
        },
        "panels": laid_out(),
    }


def main(arguments: list[str]) -> int:
    path = HERE / "dashboards" / "campfire.json"
    made = json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
    if arguments == ["--check"]:
        if path.exists() and path.read_text(encoding="utf-8") == made:
            return 0
        sys.stderr.write(f"{path} is not what {Path(__file__).name} makes; run it without --check\n")
        return 1
    path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
