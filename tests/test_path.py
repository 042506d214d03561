"""The main job, end to end, as a newcomer meets it: one command, the packaged model, real players."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from websockets.sync.client import connect

from tests.processes import ROOT, fetch, free_port, metric, wait_until

PORTS = ("GATEWAY_WS_PORT", "GATEWAY_HTTP_PORT", "GATEWAY_METRICS_PORT", "STORYTELLER_METRICS_PORT")


class Up:
    """A running `make up`, on ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.ports = {name: free_port() for name in PORTS}
        self.url = f"ws://127.0.0.1:{self.ports['GATEWAY_WS_PORT']}"
        self.http = f"http://127.0.0.1:{self.ports['GATEWAY_HTTP_PORT']}"
        self.log = folder / "up.log"
        env = {**os.environ, **{name: str(port) for name, port in self.ports.items()}}
        env.pop("REDIS_URL", None)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "up.py"], stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT, env=env
            )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "is listening" in self.log.read_text()

    def child(self, module: str) -> psutil.Process:
        return next(one for one in psutil.Process(self.process.pid).children() if module in one.cmdline())

    def metrics(self, variable: str) -> str:
        return fetch(f"http://127.0.0.1:{self.ports[variable]}/metrics")[1]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"))
    try:
        wait_until(running.is_ready, "make up", 180)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(60)


def story(url: str, **ask: object) -> tuple[str, dict[str, object]]:
    """A whole story over a plain WebSocket client, and its `done`."""
    with connect(url) as socket:
        socket.send(json.dumps({"type": "hello", "protocol": 1}))
        assert json.loads(socket.recv())["type"] == "welcome"
        socket.send(json.dumps({"type": "ask", "id": "a1", **ask}))
        frames = [json.loads(socket.recv(timeout=60))]
        while frames[-1]["type"] != "done":
            assert frames[-1]["type"] in ("queued", "text"), frames[-1]
            frames.append(json.loads(socket.recv(timeout=60)))
    assert frames[0]["type"] == "queued"
    return "".join(frame["text"] for frame in frames if frame["type"] == "text"), frames[-1]


@pytest.mark.timeout(240)
def test_three_words_become_a_story_and_the_same_seed_the_same_story(up: Up) -> None:
    ask = {"words": ["dragon", "castle", "brave"], "seed": 7, "max_tokens": 60}
    text, done = story(up.url, **ask)
    assert re.search("dragon|castle|brave", text), text
    assert len(text.split()) > 20
    assert (done["finish_reason"], done["seed"]) == ("length", 7)
    assert done["usage"]["completion_tokens"] == 60  # type: ignore[index]
    assert story(up.url, **ask)[0] == text
    assert story(up.url, **{**ask, "seed": 8})[0] != text


def test_its_address_says_which_model_it_serves(up: Up) -> None:
    health = json.loads(fetch(f"{up.http}/health")[1])
    assert "SmolLM2-135M-Instruct" in health["model"]
    assert fetch(f"{up.http}/livez")[0] == fetch(f"{up.http}/readyz")[0] == 200


@pytest.mark.timeout(240)
def test_sixteen_bots_get_all_their_endings_though_the_storyteller_is_killed_in_the_middle(
    up: Up, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "loadbots", "--url", up.url, "--players", "16", "--stories", "2"]
    command += ["--max-tokens", "60", "--seed", "3", "--out", str(rows), "--patience", "120"]
    before = up.child("storyteller").pid
    told = metric(up.metrics("STORYTELLER_METRICS_PORT"), "storyteller_tokens_total", phase="decode")
    env = {**os.environ, "LOADBOTS_METRICS_PORT": str(free_port())}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as bots:
        wait_until(
            lambda: (
                metric(up.metrics("STORYTELLER_METRICS_PORT"), "storyteller_tokens_total", phase="decode") > told + 99
            ),
            "some tokens",
        )
        up.child("storyteller").send_signal(signal.SIGKILL)
        output, _ = bots.communicate(timeout=180)
    assert bots.returncode == 0, output.decode()
    (row,) = json.loads(rows.read_text())
    assert (row["stories"], row["lost_frames"], row["repeated_frames"], row["broken_stories"]) == (32, 0, 0, 0)
    assert up.child("storyteller").pid != before


def test_a_taken_port_is_one_line_that_names_it_and_its_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {**os.environ, "REDIS_URL": "redis://127.0.0.1:1/0", "GATEWAY_WS_PORT": str(port)}
        ended = subprocess.run([sys.executable, "up.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 1
    assert ended.stderr == f"up: port {port} is taken (Address already in use): set GATEWAY_WS_PORT to another port\n"


@pytest.mark.timeout(120)
def test_interrupted_it_drains_and_leaves_no_process_behind(up: Up) -> None:
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) >= 3
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    log = up.log.read_text()
    assert log.rstrip().endswith("all processes have ended")
    assert "Traceback" not in log
