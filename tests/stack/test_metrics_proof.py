"""Two gateways and two storytellers under a crowd, watched by a real Prometheus: the dashboard and the alerts find
what they ask for, gauges fall back to zero, and no series grows with players."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.checkpoints import make_checkpoint
from tests.processes import ROOT, Gateway, Storyteller, wait_until
from tests.stack.live_stack import LiveStack, Prometheus, live_stack, prometheus

PLAYERS = 24
BOARD = json.loads((ROOT / "grafana/dashboards/campfire.json").read_text(encoding="utf-8"))
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((ROOT / "prometheus/rules/alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
GAUGES_OF_A_CROWD = (
    "gateway_connections", "gateway_listeners", "storyteller_queue_depth", "storyteller_queue_oldest_seconds",
    "storyteller_batch_size", "storyteller_batch_fill_ratio",
)  # fmt: skip
NOBODY_DIES_HERE = "storyteller_dead_letters_total|storyteller_redeliveries_total|gateway_slow_clients_total"

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian package: prometheus)"
    ),
    pytest.mark.timeout(300),
]


@dataclass
class Played:
    """What is left when a crowd has played: the stack and Prometheus still run."""

    live: LiveStack
    watch: Prometheus
    start: float
    end: float
    series_before: dict[str, set[str]]


def exposed(live: LiveStack) -> dict[str, set[str]]:
    """The names and labels of every series of each replica."""
    pages = {}
    replicas: list[Gateway | Storyteller] = [*live.gateways, *live.storytellers]
    for replica in replicas:
        lines = [line for line in replica.metrics().splitlines() if not line.startswith("#")]
        pages[replica.log.name] = {line.rpartition(" ")[0] for line in lines}
    return pages


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("stack")
    model = make_checkpoint(folder / "model")
    with live_stack(folder, model) as live, prometheus(folder, live.targets()) as watch:
        wait_until(lambda: len(watch.now('up{job!="loadbots"} == 1')) == 5, "Prometheus sees all four and itself")
        before, start = exposed(live), time.time()
        crowd = live.crowd("--players", str(PLAYERS), "--stories", "10000", "--max-tokens", "60", "--ignore-end")
        wait_until(lambda: time.time() > start + 15 or crowd.poll() is not None, "15 seconds of play")
        assert crowd.poll() is None, f"the crowd went home early: {crowd.communicate()[0]}"
        crowd.terminate()
        output = crowd.communicate(timeout=60)[0]
        row = json.loads(output.splitlines()[-1])[0]
        assert row["stories"] > PLAYERS, row
        yield Played(live, watch, start, time.time(), before)


def filled_in(expr: str) -> str:
    """As Grafana asks it, with everything chosen."""
    return expr.replace("$__rate_interval", "10s").replace("$job", ".+").replace("$instance", ".+")


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{title}-{n}" for n, (title, _) in enumerate(QUERIES)])
def test_every_query_of_every_panel_finds_something_while_a_crowd_plays(played: Played, title: str, expr: str) -> None:
    found = played.watch.since(played.start, filled_in(expr))
    values = [value for _, series in found for value in series if not math.isnan(value)]
    assert values, f"{title} is empty: {expr}"
    if not re.search(
        NOBODY_DIES_HERE + "|failed|resumes|_errors|loadbots_.*(broken|lost|repeated)|lag|oldest|depth|eta", expr
    ):
        assert max(values) > 0, f"{title} shows nothing but zero: {expr}"


@pytest.mark.parametrize("name", ALERTS)
def test_everything_that_an_alert_looks_at_is_there(played: Played, name: str) -> None:
    selectors = re.findall(r"\b(?:up|job:[\w:]+|gateway_\w+|storyteller_\w+)\b(?:\{[^}]*\})?", ALERTS[name])
    assert selectors
    for selector in selectors:
        assert played.watch.since(played.start, selector), f"{name} looks at {selector}, which is not there"


def test_prometheus_has_no_trouble_with_any_rule_and_no_alert_fires(played: Played) -> None:
    rules = [rule for group in played.watch.api("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} >= set(ALERTS)
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {labels["alertname"] for labels, _ in played.watch.now('ALERTS{alertstate="firing"}')}
    assert not firing & {"NoLiveStoryteller", "NoLiveGateway", "TargetDown", "DeadLetters", "StoriesFail"}


@pytest.mark.parametrize("gauge", GAUGES_OF_A_CROWD)
def test_a_gauge_falls_back_to_zero_when_the_crowd_has_left(played: Played, gauge: str) -> None:
    most = max(max(values) for _, values in played.watch.since(played.start, gauge))
    if gauge not in ("storyteller_queue_depth", "storyteller_queue_oldest_seconds"):
        assert most > 0, "it never moved"
    wait_until(lambda: not any(value for _, value in played.watch.now(gauge)), f"{gauge} at 0", 20)


def test_no_series_comes_or_goes_with_players(played: Played) -> None:
    before, after = played.series_before, exposed(played.live)
    assert before == after
    assert not [name for names in after.values() for name in names if re.search(r"bot|player=|story=|prompt=", name)]


def test_scrapes_every_second_do_not_hold_up_a_gateway(played: Played) -> None:
    scrapes = played.watch.since(played.start, 'scrape_duration_seconds{job=~"gateway|storyteller"}')
    lags = played.watch.since(played.start, "gateway_event_loop_lag_seconds")
    assert len(scrapes) == 4
    for found, most in ((scrapes, 0.25), (lags, 0.05)):  # the median: on a busy machine some are late for other reasons
        values = sorted(value for _, series in found for value in series)
        assert values[len(values) // 2] < most
    assert max(len(names) for names in exposed(played.live).values()) < 300


def test_the_main_panels_can_be_drawn_from_what_prometheus_kept(played: Played, tmp_path: Path) -> None:
    picture = tmp_path / "dashboard.png"
    drawn = subprocess.run(
        [sys.executable, "-m", "grafana.draw", played.watch.url, str(played.start), str(played.end), picture],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "empty" not in drawn.stdout
