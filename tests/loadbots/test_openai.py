"""The same crowd at an OpenAI-compatible door, measured with the same ruler."""

from __future__ import annotations

import pytest

from loadbots.campaign import fine
from loadbots.players import NoAnswerError
from tests.loadbots.crowds import row
from tests.loadbots.openai_peer import OpenAIPeer, openai_peer

CROWD = ("--players", "2", "--stories", "2")


async def crowd(here: OpenAIPeer, *flags: str) -> dict[str, object]:
    return await row("", "--openai", here.url, *CROWD, *flags)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_tokens_come_from_usage_and_times_from_the_stream(endpoint: str) -> None:
    async with openai_peer() as here:
        found = await crowd(here, "--endpoint", endpoint)
        asked = here.asked[0]
    assert (found["stories"], found["tokens"], found["prompt_tokens"], found["errors"]) == (4, 24, 16, {})
    assert found["broken_stories"] == 0
    assert asked["model"] == "tiny"
    assert asked["stream_options"] == {"include_usage": True}
    assert ("messages" in asked) == (endpoint == "chat")
    assert "ignore_eos" not in asked
    assert 0 <= asked["seed"] < 2**31  # some servers take 32 bits only
    assert found["verified"] == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nonsense", "expected a chunk of a completion, got b'{oops'"),
        ("no end", "the stream ended without a finish_reason or without [DONE]"),
        ("no usage", "no usage came"),
    ],
)
async def test_a_broken_stream_is_told(fault: str, said: str) -> None:
    async with openai_peer(fault) as here:
        found = await crowd(here)
    assert found["broken_stories"] == 4
    assert any(fault.startswith(said) for fault in found["faults"])  # type: ignore[attr-defined]


async def test_a_full_server_is_asked_again_after_its_retry_after() -> None:
    async with openai_peer("full") as here:
        found = await crowd(here)
    assert (found["stories"], found["errors"], found["broken_stories"]) == (4, {"busy": 2}, 0)


async def test_a_refusal_carries_the_code_of_the_error_object() -> None:
    async with openai_peer("teapot") as here:
        found = await crowd(here)
    assert (found["stories"], found["rejected"], found["errors"]) == (0, 4, {"too_long": 4})
    assert not fine([found], None)


async def test_an_error_event_ends_the_story_with_its_code() -> None:
    async with openai_peer("error event") as here:
        found = await crowd(here)
    assert found["expired"] == 4
    assert found["errors"] == {"expired": 4}
    assert found["broken_stories"] == 0


async def test_a_stream_that_stops_is_not_waited_for_for_ever() -> None:
    async with openai_peer("silent") as here:
        found = await crowd(here, "--silence", "100ms")
    assert found["errors"] == {"silence": 4}
    assert found["broken_stories"] == 4


async def test_to_cancel_is_to_hang_up() -> None:
    async with openai_peer() as here:
        found = await crowd(here, "--chaos", "cancel=1")
    assert (found["cancelled"], found["broken_stories"]) == (4, 0)


async def test_ignore_end_is_asked_for_by_the_name_that_the_server_takes() -> None:
    async with openai_peer("strict") as strict, openai_peer() as mild:
        await crowd(strict, "--ignore-end")
        await crowd(mild, "--ignore-end")
    assert strict.asked[-1]["ignore_end"] is True
    assert "ignore_eos" not in strict.asked[-1]
    assert mild.asked[-1]["ignore_end"] is mild.asked[-1]["ignore_eos"] is True


async def test_a_server_without_a_list_of_models_is_no_openai_server() -> None:
    async with openai_peer("no list") as here:
        with pytest.raises(NoAnswerError, match="expected OpenAI's list of models, got 'hello'"):
            await crowd(here)
