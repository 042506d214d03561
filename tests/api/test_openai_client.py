"""OpenAI's own client, against real processes: whole and streamed, sync and async, refused and broken off."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from tests.api.conftest import LONG
from tests.checkpoints import LONG_WINDOW
from tests.processes import Gateway, Stack, Storyteller, metric, wait_until

MODEL = "tiny-teller"
HELLO: Any = [{"role": "user", "content": "Good evening, dragon!"}]


def running_stories(storyteller: Storyteller) -> float:
    return metric(storyteller.metrics(), "storyteller_batch_size")


def test_a_completion_continues_the_prompt_as_it_is(client: OpenAI) -> None:
    told = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, seed=1)
    assert told.object == "text_completion"
    assert told.model == MODEL
    assert told.system_fingerprint
    assert told.choices[0].index == 0
    assert told.choices[0].finish_reason in ("stop", "length")
    assert told.usage
    assert told.usage.completion_tokens <= 12
    assert told.usage.total_tokens == told.usage.prompt_tokens + told.usage.completion_tokens


def test_a_chat_goes_through_the_models_template(client: OpenAI) -> None:
    raw = client.completions.create(model=MODEL, prompt="Good evening, dragon!", max_tokens=1)
    told = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=12)
    assert told.object == "chat.completion"
    assert told.choices[0].message.role == "assistant"
    assert told.choices[0].message.content
    assert told.usage
    assert raw.usage
    assert told.usage.prompt_tokens > raw.usage.prompt_tokens


def test_a_stream_is_the_same_text_in_pieces(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "seed": 7, "extra_body": {"ignore_end": True}}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_reason(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, seed=3, stream=True))
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, seed=3)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


async def test_many_answers_at_once_do_not_mix(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:

        async def streamed(seed: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt="A brave girl", max_tokens=40, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(seed: int) -> str:
            told = await client.completions.create(model=MODEL, prompt="A brave girl", max_tokens=40, seed=seed)
            return told.choices[0].text

        seeds = range(12)
        streams, wholes = await asyncio.gather(
            asyncio.gather(*map(streamed, seeds)), asyncio.gather(*map(whole, seeds))
        )
    assert streams == wholes
    assert len(set(streams)) == len(seeds)


def test_no_part_of_a_stop_string_is_told(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 80, "seed": 5, "extra_body": {"ignore_end": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:23]
    told = client.completions.create(**asked, stop=["never to be seen", stop]).choices[0]
    assert told.finish_reason == "stop"
    assert told.text == text[: text.index(stop)]


def test_settings_beyond_openais_own_are_taken(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 20}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    more = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0}
    assert client.completions.create(**asked, temperature=2, top_p=1, extra_body=more).choices[0].text == greedy


def test_the_model_is_listed_and_no_other_one_is_known(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "campfire"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4o")
    assert refused.value.code == "model_not_found"


def test_whatever_model_is_named_the_one_that_is_here_answers_and_says_so(client: OpenAI) -> None:
    assert client.completions.create(model="gpt-4o", prompt="Once", max_tokens=1).model == MODEL


def test_a_prompt_that_leaves_no_room_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model=MODEL, prompt="~^" * (LONG_WINDOW // 2 + 1), max_tokens=5)
    assert refused.value.status_code == 413
    assert refused.value.code == "too_long"
    assert refused.value.param == "prompt"


def test_messages_that_the_template_refuses_are_a_bad_request(client: OpenAI) -> None:
    late: Any = [*HELLO, {"role": "system", "content": "Be brief."}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=late)
    assert client.chat.completions.create(model=MODEL, messages=late[::-1], max_tokens=2).choices


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_frees_its_place(
    is_stream: bool, gateway: Gateway, storyteller: Storyteller, client: OpenAI
) -> None:
    cancelled = metric(gateway.metrics(), "gateway_stories_total", finish_reason="cancelled")
    if is_stream:
        with client.completions.create(model=MODEL, prompt="Once", stream=True, **LONG) as stream:
            assert next(iter(stream)).choices[0].text
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(model=MODEL, prompt="Once", **LONG)
    wait_until(lambda: running_stories(storyteller) == 0, "a free place in the batch", 10)
    wait_until(
        lambda: metric(gateway.metrics(), "gateway_stories_total", finish_reason="cancelled") == cancelled + 1,
        "one more cancelled story",
        10,
    )
    assert metric(gateway.metrics(), "gateway_listeners") == 0


def test_a_player_over_the_limit_is_told_when_to_come_again(client: OpenAI, storyteller: Storyteller) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "user": "greedy", "stream": True, **LONG}
    with client.completions.create(**asked), client.completions.create(**asked):
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="Once", user="greedy", max_tokens=1)
        assert refused.value.code == "rate_limited"
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert client.completions.create(model=MODEL, prompt="Once", max_tokens=1).choices  # nobody's limit
    wait_until(lambda: running_stories(storyteller) == 0, "an idle storyteller", 10)
    assert client.completions.create(model=MODEL, prompt="Once", user="greedy", max_tokens=1).choices


async def test_a_full_queue_and_an_ask_that_waits_too_long_are_told_apart(
    running: Stack, storyteller: Storyteller, gateway: Gateway
) -> None:
    narrow = running.gateway(GATEWAY_QUEUE_LIMIT="1")
    wait_until(narrow.is_ready, "a ready gateway")
    async with (
        AsyncOpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as wide_client,
        AsyncOpenAI(base_url=f"{narrow.http}/v1", api_key="none", max_retries=0) as client,
    ):
        batch = [
            asyncio.create_task(wide_client.completions.create(model=MODEL, prompt="Once", **LONG)) for _ in "1234"
        ]
        await asyncio.to_thread(wait_until, lambda: running_stories(storyteller) == 4, "a full batch", 10)
        for is_stream in (False, True):
            waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt="Once", stream=is_stream))
            await asyncio.to_thread(
                wait_until, lambda: metric(storyteller.metrics(), "storyteller_queue_depth") == 1, "one that waits", 10
            )
            with pytest.raises(openai.InternalServerError) as full:
                await client.completions.create(model=MODEL, prompt="Once", max_tokens=1)
            assert (full.value.status_code, full.value.code) == (503, "busy")
            assert int(full.value.response.headers["Retry-After"]) >= 1
            with pytest.raises(openai.InternalServerError) as late:
                await waiting
            assert (late.value.status_code, late.value.code) == (504, "expired")
        for task in batch:
            task.cancel()
        await asyncio.gather(*batch, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: running_stories(storyteller) == 0, "an idle storyteller", 10)
    assert narrow.stop() == 0


def test_a_draining_gateway_ends_its_answers_and_takes_no_more(running: Stack, storyteller: Storyteller) -> None:
    gateway = running.gateway()
    wait_until(gateway.is_ready, "a ready gateway")
    with OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "prompt": "Once", "extra_body": {"ignore_end": True}}
        with client.completions.create(**asked, max_tokens=6000, stream=True) as stream:
            chunks = iter(stream)
            next(chunks)
            gateway.signal(signal.SIGTERM)
            wait_until(lambda: not gateway.is_ready(), "a gateway that is not ready", 10)
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**asked, max_tokens=1)
            assert (refused.value.status_code, refused.value.code) == (503, "busy")
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert gateway.process.wait(10) == 0
    assert "Traceback" not in gateway.text()


def test_a_story_that_is_lost_ends_as_failed_whole_or_in_the_middle(
    running: Stack, gateway: Gateway, client: OpenAI, storyteller: Storyteller
) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", **LONG}
    with ThreadPoolExecutor() as threads, client.completions.create(**asked, stream=True) as stream:
        chunks = iter(stream)
        next(chunks)
        whole = threads.submit(lambda: client.completions.create(**asked))
        wait_until(lambda: running_stories(storyteller) == 2, "two running stories", 10)
        Redis.from_url(running.valkey.url).flushall()
        with pytest.raises(openai.APIError) as broken_off:
            list(chunks)
        with pytest.raises(openai.InternalServerError) as failed:
            whole.result(30)
    assert broken_off.value.code == "failed"
    assert (failed.value.status_code, failed.value.code) == (500, "failed")
    wait_until(gateway.is_ready, "a ready gateway", 15)
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=1).choices
