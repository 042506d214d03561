"""The stack that the tests of this folder disturb, and the stories as they are when nobody does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.client import ClientProtocol
from websockets.protocol import State
from websockets.uri import parse_uri

from gateway import wire
from tests.processes import Gateway, wait_until
from tests.reliability.crowd import Crowd
from tests.reliability.house import House, house, make_model

SEEDS = range(16)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with house(folder, make_model(folder / "model")) as running:
        yield running


class Silent:
    """A game client whose machine vanished: it said hello once, and neither reads nor answers anything since."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._protocol = ClientProtocol(parse_uri(gateway.url))
        self._socket = socket.create_connection(("127.0.0.1", gateway.ws_port), timeout=10)
        self._protocol.send_request(self._protocol.connect())
        self._send()
        while self._protocol.state is State.CONNECTING:
            self._protocol.receive_data(self._socket.recv(65536))
        self._protocol.send_text(wire.encode(wire.Hello(wire.PROTOCOL)).encode())
        self._send()

    def code_received(self) -> int | None:
        """The close code that lies in the socket's buffer, now that somebody looks."""
        with suppress(ConnectionResetError):
            while data := self._socket.recv(65536):
                self._protocol.receive_data(data)
        self._protocol.receive_eof()
        return self._protocol.close_code

    def end(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        for data in self._protocol.data_to_send():
            self._socket.sendall(data)


@pytest.fixture(scope="session")
def silent(running: House) -> Iterator[Silent]:
    """At a gateway of its own, opened early: its end takes two heartbeats."""
    gateway = running.gateway()
    wait_until(gateway.is_live, "a live gateway")
    silent = Silent(gateway)
    yield silent
    silent.end()


@pytest.fixture(scope="session")
def truth(running: House) -> dict[int, str]:
    """Every seed's story, told in an undisturbed run."""

    async def tell() -> dict[int, str]:
        crowd = Crowd(running.urls, SEEDS)
        async with crowd.playing():
            pass
        assert crowd.num_resumes == 0
        return {heard.seed: heard.text for heard in crowd.heard}

    return asyncio.run(tell())


@pytest.fixture
def stack(running: House, silent: Silent) -> House:
    """The stack, whole again after whatever the last test did to it."""
    running.furnish()
    return running


@pytest.fixture
def small_stack(running: House, silent: Silent) -> House:
    """The stack where one storyteller is enough; there may be two."""
    running.furnish(storytellers=1)
    return running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever comes first starts the whole stack, and compiles the kernels where nobody has yet."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300))


_figures: list[str] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes down what a test measured; all of it is printed at the end."""

    def take_down(text: str) -> None:
        _figures.append(f"{request.node.name.removeprefix('test_').replace('_', ' ')}: {text}")

    return take_down


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.line(line)
