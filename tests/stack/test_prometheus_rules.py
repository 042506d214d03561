"""Prometheus finds every replica, its rules do what they say, and every alert has a paragraph for whoever it wakes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "prometheus"
RULES = [
    rule
    for path in sorted((FOLDER / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in RULES if "alert" in rule}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian package: prometheus)"
)
each_alert = pytest.mark.parametrize("name", ALERTS)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_configuration_and_the_rules() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")
    assert "FAILED" not in promtool("check", "rules", *sorted((FOLDER / "rules").glob("*.yml")))


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_keeps_quiet_beside_it() -> None:
    assert "SUCCESS" in promtool("test", "rules", *sorted((FOLDER / "tests").glob("*.yml")))


@each_alert
def test_each_alert_is_fired_by_a_unit_test(name: str) -> None:
    cases = yaml.safe_load((FOLDER / "tests/alerts.yml").read_text(encoding="utf-8"))["tests"]
    tried = [case for test in cases for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
    assert any(case["exp_alerts"] for case in tried)


@each_alert
def test_each_alert_says_whom_it_wakes_what_happened_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    page, _, place = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert place in map(anchor, headings)


def test_the_operators_page_describes_no_alert_that_is_gone() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    described = re.findall(r"^### (\w+)$", page.partition("## Alerts")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(described) == sorted(ALERTS)


def test_every_replica_of_a_service_is_found_through_dns_on_its_metrics_port() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs if "dns_sd_configs" in job}
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert set(found) <= set(services)
    assert {job: (sd["names"], sd["type"], sd["port"]) for job, sd in found.items()} == {
        "gateway": (["gateway"], "A", 9101),
        "storyteller": (["storyteller"], "A", 9102),
        "loadbots": (["loadbots"], "A", 9103),
    }
