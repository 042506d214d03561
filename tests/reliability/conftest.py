"""The stack that the tests of this folder disturb, and the stories as they are when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.reliability.crowd import Crowd
from tests.reliability.house import House, house, make_model

SEEDS = range(16)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with house(folder, make_model(folder / "model")) as running:
        yield running


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
def stack(running: House) -> House:
    """The stack, whole again after whatever the last test did to it."""
    running.furnish()
    return running


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
