"""Plain requests to the HTTP door, for tests that must see statuses, headers and bodies as they are."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.processes import Gateway


def post(gateway: Gateway, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON body and headers (by lower-case names)."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def complete(gateway: Gateway, **fields: Any) -> tuple[int, dict[str, Any]]:
    return post(gateway, "/v1/completions", {"prompt": "Once", "max_tokens": 1, **fields})[:2]


def chat(gateway: Gateway, messages: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    return post(gateway, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields})[:2]
