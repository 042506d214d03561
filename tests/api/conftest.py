"""One stack of real processes for all tests of the HTTP door, with a model whose stories can be very long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.checkpoints import FOR_EVER, LONG_WINDOW, make_checkpoint
from tests.processes import Gateway, Stack, Storyteller, stack, wait_until

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
LONG: Any = {"max_tokens": FOR_EVER, "extra_body": {"ignore_end": True}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-teller", window=LONG_WINDOW, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack"), model) as all_processes:
        yield all_processes


@pytest.fixture(scope="session")
def storyteller(running: Stack) -> Storyteller:
    return running.storyteller(
        STORYTELLER_MAX_TOKENS=str(FOR_EVER),
        STORYTELLER_BATCH_SIZE="4",
        STORYTELLER_KV_TOKENS=str(5 * LONG_WINDOW),
        STORYTELLER_THREADS="1",
        STORYTELLER_DEADLINE_S="2",
    )


@pytest.fixture(scope="session")
def gateway(running: Stack, storyteller: Storyteller) -> Gateway:
    gateway = running.gateway()
    wait_until(gateway.is_ready, "a ready gateway")
    return gateway


@pytest.fixture(scope="session")
def client(gateway: Gateway) -> Iterator[OpenAI]:
    """OpenAI's own client, which must not hide a refusal by trying again."""
    with OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
