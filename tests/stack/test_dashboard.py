"""The dashboard is what its generator makes, and keeps the rules of Grafana's dashboard-linter.

Whether its queries find anything is shown against a live stack, in test_metrics_proof.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "grafana/dashboards/campfire.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
COUNTER = r"\b[a-z_]+_(?:total|sum|count|bucket)\b(?=\{)"

each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
each_expression = pytest.mark.parametrize("expr", EXPRESSIONS)


def variables() -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in BOARD["templating"]["list"]}


def selectors(expr: str) -> Iterator[str]:
    """What stands in the braces of each metric."""
    return (found[1] for found in re.finditer(r"\b[a-z_]+\{([^}]*)\}", expr))


def test_the_dashboard_is_what_its_generator_makes() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "grafana.generate", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def test_nobody_edits_it_by_hand() -> None:
    assert BOARD["editable"] is False
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/campfire.yml").read_text(encoding="utf-8"))
    assert provider["providers"][0]["allowUiUpdates"] is False


def test_its_data_source_job_and_instance_can_be_chosen() -> None:
    assert variables()["datasource"]["type"] == "datasource"
    assert variables()["datasource"]["label"] == "Data source"
    assert variables()["datasource"]["query"] == "prometheus"
    for name in ("job", "instance"):
        variable = variables()[name]
        assert variable["label"] == name.capitalize()
        assert variable["type"] == "query"
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["multi"] is True
        assert variable["includeAll"] is True
        assert variable["allValue"] == ".+"
        assert variable["refresh"] == 2, "read anew when the time range changes"


def test_the_data_source_that_is_chosen_first_is_the_provisioned_one() -> None:
    path = ROOT / "grafana/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(path.read_text(encoding="utf-8"))["datasources"]
    assert variables()["datasource"]["current"]["value"] == source["uid"]


def test_its_rows_are_questions_in_an_operators_order() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert [title.partition(",")[0].rstrip("?") for title in rows] == [
        "Are players served", "Are players served", "Is a queue building", "Is the batch full",
        "What is the machine doing",
    ]  # fmt: skip


@each_panel
def test_every_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"] in {"s", "short", "percentunit", "ops", "bytes"}


@each_panel
def test_every_panel_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for asked in (panel, *panel["targets"]):
        assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_covers_another_and_none_leaves_the_page() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@each_expression
def test_every_query_follows_the_chosen_job_and_instance(expr: str) -> None:
    found = list(selectors(expr))
    assert found
    for selector in found:
        assert 'job=~"$job"' in selector
        assert 'instance=~"$instance"' in selector


@each_expression
def test_every_counter_is_a_rate_over_the_interval_that_grafana_chooses(expr: str) -> None:
    for counter in re.finditer(COUNTER, expr):
        assert re.search(r"(rate|increase)\($", expr[: counter.start()]), expr
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {"$__rate_interval"}


@each_expression
def test_every_query_works_with_replicas(expr: str) -> None:
    """It adds up (or takes the most of) all replicas, or its result names each by itself."""
    assert re.match(r"(sum|max|min|histogram_quantile)\b", expr) or expr.startswith("storyteller_info")
    for histogram in re.finditer(r"histogram_quantile\([\d.]+, (.*)\)$", expr):
        assert histogram[1].startswith("sum by (le) (rate(")


def test_every_panel_that_keeps_replicas_apart_says_which_is_which() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in (re.search(r"by \(([^)]*)\)", target["expr"]) or ["", ""])[1].split(", "):
                if label not in ("", "le"):
                    assert f"{{{{{label}}}}}" in target["legendFormat"], panel["title"]
