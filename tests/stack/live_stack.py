"""A live stack of two of each, a crowd of bots, and a real Prometheus that watches all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.processes import ROOT, Gateway, Process, Stack, Storyteller, fetch, free_port, stack, wait_until


@dataclass
class Prometheus:
    """A running Prometheus, asked over its API."""

    url: str

    def api(self, path: str, **arguments: str) -> Any:
        status, text = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", 30)
        assert status == 200, f"{arguments}: {text}"
        return json.loads(text)["data"]

    def now(self, query: str) -> list[tuple[dict[str, str], float]]:
        return [(one["metric"], float(one["value"][1])) for one in self.api("query", query=query)["result"]]

    def since(self, start: float, query: str) -> list[tuple[dict[str, str], list[float]]]:
        """Every series that the query finds from `start` until now, with its values."""
        found = self.api("query_range", query=query, start=str(start), end=str(time.time()), step="1")
        return [(one["metric"], [float(value) for _, value in one["values"]]) for one in found["result"]]


class LiveStack:
    """Two gateways and two storytellers, and where their metrics and the bots' are."""

    def __init__(self, running: Stack) -> None:
        self.storytellers: list[Storyteller] = [running.storyteller(STORYTELLER_BATCH_SIZE="8") for _ in range(2)]
        self.gateways: list[Gateway] = [running.gateway() for _ in range(2)]
        for gateway in self.gateways:
            wait_until(gateway.is_ready, "a ready gateway")
        self.loadbots_port = free_port()

    def targets(self) -> dict[str, list[str]]:
        return {
            "gateway": [f"127.0.0.1:{gateway.metrics_port}" for gateway in self.gateways],
            "storyteller": [f"127.0.0.1:{storyteller.metrics_port}" for storyteller in self.storytellers],
            "loadbots": [f"127.0.0.1:{self.loadbots_port}"],
        }

    def crowd(self, *arguments: str) -> subprocess.Popen[str]:
        """Bots that play at both gateways until they are done, or told to stop."""
        command = [sys.executable, "-m", "loadbots", "--url", *(gateway.url for gateway in self.gateways)]
        command += ["--metrics-port", str(self.loadbots_port), *arguments]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)


@contextmanager
def live_stack(folder: Path, model: Path | str) -> Iterator[LiveStack]:
    """Ready to be played; afterwards every service must end by itself, with 0."""
    with stack(folder, model) as running:
        live = LiveStack(running)
        yield live
        for service in (*live.gateways, *live.storytellers):
            assert service.stop() == 0, service.text()[-4000:]


@contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]], scrape_interval: str = "1s") -> Iterator[Prometheus]:
    """The configuration that ships, with addresses in place of DNS and a shorter breath."""
    address = f"127.0.0.1:{free_port()}"
    shipped = yaml.safe_load((ROOT / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    shipped["global"] |= {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval}
    shipped["rule_files"] = [str(ROOT / "prometheus" / name) for name in shipped["rule_files"]]
    for job in shipped["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": targets.get(job["job_name"], [address])}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(shipped), encoding="utf-8")
    command = [
        shutil.which("prometheus") or "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}", f"--web.listen-address={address}",
    ]  # fmt: skip
    running = Process("prometheus", command, folder, {})
    try:
        wait_until(lambda: fetch(f"http://{address}/-/ready")[0] == 200, "a ready Prometheus")
        yield Prometheus(f"http://{address}")
    finally:
        running.stop()
