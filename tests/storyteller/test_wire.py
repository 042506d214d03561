"""Settings, cursors and codecs that both sides rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config as GatewayConfig
from storyteller import wire
from storyteller.config import Config


def test_defaults_are_those_of_the_contract() -> None:
    config = wire.read_settings(Config, {})
    assert (config.redis_url, config.batch_size, config.batch_wait_ms) == ("redis://127.0.0.1:6379/0", 64, 5)
    assert (config.quantize, config.batching, config.max_tokens) == ("int8", "continuous", 200)
    assert (config.metrics_port, config.deadline_s) == (9102, 60)
    gateway = wire.read_settings(GatewayConfig, {})
    assert (gateway.host, gateway.ws_port, gateway.http_port, gateway.metrics_port) == ("127.0.0.1", 8765, 8080, 9101)
    assert (gateway.queue_limit, gateway.player_limit, gateway.grace_s) == (1024, 2, 30)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("STORYTELLER_BATCH_SIZE", "many", "STORYTELLER_BATCH_SIZE=many: expected a number from 1 to 1024"),
        ("STORYTELLER_BATCH_SIZE", "0", "STORYTELLER_BATCH_SIZE=0: expected a number from 1 to 1024"),
        ("STORYTELLER_BATCHING", "best", "STORYTELLER_BATCHING=best: expected continuous, static or single"),
        ("STORYTELLER_METRICS_PORT", "70000", "STORYTELLER_METRICS_PORT=70000: expected a port from 1 to 65535"),
        ("STORYTELLER_DEADLINE_S", "nan", "STORYTELLER_DEADLINE_S=nan: expected seconds above 0"),
        ("REDIS_URL", "http://x", "REDIS_URL=http://x: expected redis://, rediss:// or unix:// and an address"),
    ],
)
def test_a_wrong_setting_is_one_line_with_name_value_and_expectation(name: str, value: str, expected: str) -> None:
    with pytest.raises(wire.SettingsError) as error:
        wire.read_settings(Config, {name: value})
    assert str(error.value) == expected


def test_neither_a_key_nor_a_password_is_ever_shown(tmp_path: Path) -> None:
    with pytest.raises(wire.SettingsError) as error:
        wire.read_settings(Config, {"REDIS_URL": "http://me:hunter2@host"})
    assert "hunter2" not in str(error.value)
    with pytest.raises(wire.SettingsError) as error:
        wire.read_settings(GatewayConfig, {"GATEWAY_AUTH_KEY_FILE": str(tmp_path / "none")})
    assert "GATEWAY_AUTH_KEY_FILE" in str(error.value)


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    assert wire.read_settings(GatewayConfig, {"GATEWAY_AUTH_KEY_FILE": str(tmp_path / "key")}).auth_key == "s3cret"


def test_help_lists_every_setting() -> None:
    for kind in (Config, GatewayConfig):
        text = wire.settings_help("x", kind)
        assert all(name in text for name, *_ in wire.settings_of(kind))


def test_a_cursor_belongs_to_its_story_and_place() -> None:
    cursor = wire.cursor("abc", 57)
    assert wire.offset_of("abc", cursor) == 57
    for story, text in (("abd", cursor), ("abc", cursor.replace("57", "58")), ("abc", ""), ("abc", "-1.00000000")):
        with pytest.raises(ValueError, match=r"malformed|of another story"):
            wire.offset_of(story, text)


@pytest.mark.parametrize(
    "prompt", [wire.Words(("a", "b")), wire.Text("x"), wire.Raw(""), wire.Chat((wire.Message("user", "x"),))]
)
def test_an_ask_survives_the_wire(prompt: wire.Prompt) -> None:
    ask = wire.Ask("s", prompt, 2**63 - 1, wire.Settings(stop=("x",), temperature=0.5), "v", "p", "high")
    assert wire.decode(wire.Ask, wire.encode(ask)) == ask


def test_entries_of_a_story_survive_the_wire() -> None:
    told = wire.Told(3, "Über\n🐉", (1, 2**31), 9)
    assert wire.read_entry(_as_redis_returns(told.fields())) == told
    ending = wire.Ending("stop", 4, 9, "why", "one two")
    fields = {"end": "stop", "seed": 7, "queue_ms": 1, "first_text_ms": 2, "total_ms": 3, **ending.fields()}
    assert wire.read_entry(_as_redis_returns(fields)) == wire.Ending("stop", 4, 9, "why", "one two", 7, 1, 2, 3)
    assert wire.read_entry({b"mark": b"begun"}) == wire.Begun("begun")


def _as_redis_returns(fields: dict[str, bytes | str | int]) -> dict[bytes, bytes]:
    return {name.encode(): value if isinstance(value, bytes) else str(value).encode() for name, value in fields.items()}
