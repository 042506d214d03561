"""The gateway's settings: read once from the environment, checked, never changed."""

from __future__ import annotations

from typing import Annotated

import msgspec

from storyteller.wire import setting


def _port(meaning: str) -> msgspec.Meta:
    return setting("a port from 1 to 65535", meaning, ge=1, le=65535)


class Config(msgspec.Struct, frozen=True):
    """One gateway. An empty text is an unset one."""

    redis_url: Annotated[
        str,
        setting(
            "redis://, rediss:// or unix:// and an address",
            "Redis 7.0 or newer, or Valkey 8 or newer",
            pattern="^(rediss?|unix)://",
        ),
    ] = msgspec.field(default="redis://127.0.0.1:6379/0", name="REDIS_URL")
    host: Annotated[str, setting("an address", "where all listeners bind")] = msgspec.field(
        default="127.0.0.1", name="GATEWAY_HOST"
    )
    ws_port: Annotated[int, _port("the game's WebSocket")] = msgspec.field(default=8765, name="GATEWAY_WS_PORT")
    http_port: Annotated[int, _port("HTTP API and page")] = msgspec.field(default=8080, name="GATEWAY_HTTP_PORT")
    metrics_port: Annotated[int, _port("metrics")] = msgspec.field(default=9101, name="GATEWAY_METRICS_PORT")
    auth_key: Annotated[
        str, setting("a key", "HS256 key; when set, hello needs a JWT whose sub is the player", secret=True)
    ] = msgspec.field(default="", name="GATEWAY_AUTH_KEY")
    api_keys: Annotated[
        str, setting("keys with commas between", "when set, /v1/* needs one of them as a bearer token", secret=True)
    ] = msgspec.field(default="", name="GATEWAY_API_KEYS")
    origins: Annotated[
        str, setting("origins with commas between", "allowed Origin headers; unset: the page's own, and none")
    ] = msgspec.field(default="", name="GATEWAY_ORIGINS")
    queue_limit: Annotated[
        int, setting("a number from 1", "asks that may wait, over all gateways, before busy", ge=1)
    ] = msgspec.field(default=1024, name="GATEWAY_QUEUE_LIMIT")
    player_limit: Annotated[
        int, setting("a number from 1", "unfinished asks one player may have, over all gateways", ge=1)
    ] = msgspec.field(default=2, name="GATEWAY_PLAYER_LIMIT")
    grace_s: Annotated[
        float, setting("seconds from 0", "how long a story goes on after its last listener left", ge=0)
    ] = msgspec.field(default=30, name="GATEWAY_GRACE_S")

    @property
    def allowed_origins(self) -> frozenset[str]:
        return _list(self.origins)

    @property
    def allowed_api_keys(self) -> frozenset[str]:
        return _list(self.api_keys)


def _list(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())
