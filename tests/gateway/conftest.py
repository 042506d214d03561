"""One stack of real processes for the tests of the game's door: a storyteller that tells one story at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints import FOR_EVER, LONG_WINDOW, make_checkpoint
from tests.processes import Gateway, Stack, Storyteller, stack, wait_until


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-teller", window=LONG_WINDOW)
    with stack(tmp_path_factory.mktemp("stack"), model) as all_processes:
        yield all_processes


@pytest.fixture(scope="session")
def storyteller(running: Stack) -> Storyteller:
    return running.storyteller(
        STORYTELLER_MAX_TOKENS=str(FOR_EVER),
        STORYTELLER_BATCH_SIZE="1",
        STORYTELLER_KV_TOKENS=str(2 * LONG_WINDOW),
        STORYTELLER_THREADS="1",
    )


@pytest.fixture(scope="session")
def gateway(running: Stack, storyteller: Storyteller) -> Gateway:
    gateway = running.gateway()
    wait_until(gateway.is_ready, "a ready gateway")
    return gateway


@pytest.fixture(scope="session")
def second_gateway(running: Stack, storyteller: Storyteller) -> Gateway:
    gateway = running.gateway(GATEWAY_QUEUE_LIMIT="2")
    wait_until(gateway.is_ready, "a ready gateway")
    return gateway
