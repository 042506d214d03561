"""The HTTP door, byte by byte: what is refused and in which words, keys, origins, bodies that are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.asking import chat, complete, post
from tests.checkpoints import LONG_WINDOW
from tests.processes import Gateway, Stack, Storyteller, fetch, metric, wait_until

KEY = "one-of-our-keys"


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2}, {"best_of": 3}, {"echo": True}, {"suffix": "the end"}, {"logprobs": 0}, {"logprobs": True},
        {"top_logprobs": 5}, {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"functions": [{}]},
        {"logit_bias": {"50256": -100}}, {"presence_penalty": 0.5}, {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}}, {"modalities": ["text", "audio"]}, {"audio": {"voice": "x"}},
        {"prediction": {"type": "content", "content": "x"}},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_what_there_is_not_is_refused_by_its_name(field: dict[str, Any], gateway: Gateway) -> None:
    status, body = complete(gateway, **field)
    (name,) = field
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "unsupported_parameter"
    assert body["error"]["param"] == name
    assert body["error"]["message"].startswith(f"{name}: expected ")


def test_fields_that_ask_for_nothing_special_are_taken(gateway: Gateway) -> None:
    harmless: dict[str, Any] = {
        "n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none", "store": True,
        "response_format": {"type": "text"}, "metadata": {"a": "b"}, "service_tier": "auto", "stop": None,
        "temperature": None, "stream": None, "stream_options": None, "user": "", "model": "", "never_heard_of": 1,
    }  # fmt: skip
    status, body = complete(gateway, **harmless)
    assert status == 200, body
    assert body["choices"][0]["logprobs"] is None
    assert complete(gateway, prompt=["Once"])[0] == 200
    assert complete(gateway, prompt="")[0] == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.1}, "temperature", "temperature: expected float <= 2.0, got 2.1"),
        ({"temperature": "hot"}, "temperature", "temperature: expected float | null, got str"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: expected int >= 1, got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens: expected int >= 1, got -1"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens: expected int | null, got float"),
        ({"top_p": 1.01}, "top_p", "top_p: expected float <= 1.0, got 1.01"),
        ({"top_k": -1}, "top_k", "top_k: expected int >= 0, got -1"),
        ({"min_p": -0.1}, "min_p", "min_p: expected float >= 0.0, got -0.1"),
        ({"seed": 2**63}, "seed", "seed: expected int <= 9223372036854775807, got 9223372036854775808"),
        ({"seed": -1}, "seed", "seed: expected int >= 0, got -1"),
        ({"stop": [".", "!", "?", ";", ":"]}, "stop", 'stop: expected array of length <= 4, got [".","!","?",";",":"]'),
        ({"stop": [""]}, "stop", 'stop[0]: expected str of length >= 1, got ""'),
        ({"prompt": 7}, "prompt", "prompt: expected str | array, got int"),
        ({"prompt": [1, 2]}, "prompt", "prompt: expected array of length <= 1, got [1,2]"),
        ({"prompt": None}, "prompt", "prompt: expected str | array, got null"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: expected it only where"),
        ({"user": "x" * 300}, "user", "user: expected str of length <= 256, got "),
    ],
    ids=str,
)
def test_a_wrong_value_is_told_what_was_expected_and_what_came(
    fields: dict[str, Any], param: str, words: str, gateway: Gateway
) -> None:
    status, body = complete(gateway, **fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(words)
    assert body["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: expected array of length >= 1, got []"),
        ("Good evening", "messages: expected array, got str"),
        ([{"role": "user"}], "messages[0]: expected the field content, got none"),
        ([{"role": "user", "content": None}], "messages[0].content: expected str | array, got null"),
        ([{"role": "tool", "content": "x"}], "messages[0].role: expected system, developer, user or assistant, got"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ],
    ids=["none", "no list", "no content", "null", "a tool", "a picture"],
)
def test_messages_that_are_none_are_refused(messages: Any, words: str, gateway: Gateway) -> None:
    status, body = chat(gateway, messages)
    assert status == 400
    assert body["error"]["param"] == "messages"
    assert body["error"]["message"].startswith(words)


def test_text_in_parts_and_developers_are_as_good_as_text_and_systems(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "evening"}]
    one = chat(gateway, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], seed=1)
    two = chat(
        gateway, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Good evening"}], seed=1
    )
    assert one[0] == two[0] == 200
    assert one[1]["choices"] == two[1]["choices"]
    assert one[1]["usage"] == two[1]["usage"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff\xfe", b'{"prompt":"\\ud800"}', b"[" * 100_000,
     b'{"prompt":"x","extra":' + b'{"a":' * 50_000, b'{"prompt":"x","temperature":NaN}',
     b'{"prompt":"x","temperature":1e999}', b'{"prompt":"x\x01"}'],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_bad_request(body: bytes, gateway: Gateway) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer, _ = post(gateway, path, body)
        assert status == 400
        assert answer["error"]["code"] == "bad_request"
        assert "expected" in answer["error"]["message"]


def test_huge_numbers_mean_as_much_as_there_is(gateway: Gateway) -> None:
    status, body = complete(gateway, max_tokens=10**30, top_k=10**30, stop=["e", "a", "U", " "])
    assert status == 200, body
    assert complete(gateway, seed=2**63 - 1)[0] == 200


def test_a_body_that_is_too_large_is_413_also_when_it_is_small_on_the_wire(gateway: Gateway) -> None:
    large = json.dumps({"prompt": "a" * 300_000}).encode()
    assert post(gateway, "/v1/completions", large)[0] == 413
    bomb = gzip.compress(json.dumps({"prompt": "a" * 50_000_000}).encode())
    status, body, _ = post(gateway, "/v1/completions", bomb, **{"Content-Encoding": "gzip"})
    assert status == 413
    assert body["error"]["code"] == "too_long"
    assert post(gateway, "/v1/completions", b"no gzip at all", **{"Content-Encoding": "gzip"})[0] == 400


def test_unknown_paths_and_methods_get_errors_in_openais_shape(gateway: Gateway) -> None:
    assert post(gateway, "/v1/embeddings", {})[0] == 404
    status, text = fetch(f"{gateway.http}/v1/completions")
    assert status == 405
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


def test_a_page_of_somebody_else_may_not_ask(gateway: Gateway) -> None:
    body = {"prompt": "Once", "max_tokens": 1}
    status, answer, _ = post(gateway, "/v1/completions", body, Origin="https://evil.example")
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert post(gateway, "/v1/completions", body, Origin=gateway.http)[0] == 200


@pytest.fixture(scope="module")
def locked(running: Stack, storyteller: Storyteller) -> Iterator[Gateway]:
    gateway = running.gateway(GATEWAY_API_KEYS=f"another-key, {KEY}")
    wait_until(gateway.is_ready, "a ready gateway")
    yield gateway
    assert gateway.stop() == 0


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer \udcff", f"Bearer {KEY}x"]
)
def test_without_one_of_the_keys_nothing_under_v1_answers(header: str | None, locked: Gateway) -> None:
    headers = {} if header is None else {"Authorization": header.encode("utf-8", "surrogateescape").decode("latin-1")}
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, body, answered = post(locked, path, {"prompt": "Once"}, **headers)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert answered["www-authenticate"] == "Bearer"
        assert KEY not in body["error"]["message"]
    assert fetch(f"{locked.http}/v1/models")[0] == 401


def test_each_of_the_keys_opens_and_probes_need_none(locked: Gateway) -> None:
    for key in (KEY, "another-key"):
        assert (
            post(locked, "/v1/completions", {"prompt": "Once", "max_tokens": 1}, Authorization=f"Bearer {key}")[0]
            == 200
        )
    assert fetch(f"{locked.http}/health")[0] == 200
    assert json.loads(fetch(f"{locked.http}/health")[1])["model"] == "tiny-teller"


def test_refusals_are_counted_by_their_code(gateway: Gateway) -> None:
    def counted(outcome: str) -> float:
        return metric(gateway.metrics(), "gateway_asks_total", outcome=outcome)

    before = {outcome: counted(outcome) for outcome in ("accepted", "bad_request", "too_long")}
    complete(gateway)
    complete(gateway, n=2)
    complete(gateway, prompt="~^" * (LONG_WINDOW // 2 + 1))
    assert {outcome: counted(outcome) - count for outcome, count in before.items()} == dict.fromkeys(before, 1)
