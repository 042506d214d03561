"""A hand-made OpenAI-compatible server for the bots, and one fault at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class OpenAIPeer:
    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.asked: list[dict[str, Any]] = []
        self.hung_up = 0
        self.left_to_refuse = 2  # "full" only
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        if self.fault == "no list":
            return web.Response(text="hello")
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if "ignore_eos" in body and self.fault == "strict":
            return web.json_response({"error": {"message": "unknown field", "code": "bad_request"}}, status=400)
        if self.fault == "full" and self.left_to_refuse:
            self.left_to_refuse -= 1
            return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "0.02"})
        if self.fault == "teapot":
            return web.json_response({"error": {"message": "no", "code": "too_long"}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        chat = request.path.endswith("chat/completions")
        try:
            for number in range(6):
                await asyncio.sleep(0.003)
                if number == 3 and self.fault:
                    await self.misbehave(answer)
                text = f" word{number}"
                choice = {"delta": {"content": text}} if chat else {"text": text}
                await self.send(answer, {"id": "c1", "choices": [choice | {"index": 0, "finish_reason": None}]})
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            await self.send(answer, {"id": "c1", "choices": [last | {"index": 0, "finish_reason": "length"}]})
            if self.fault != "no usage":
                await self.send(answer, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}})
            if self.fault != "no end":
                await answer.write(b"data: [DONE]\n\n")
        except (ConnectionError, EOFError):
            self.hung_up += 1
        return answer

    async def misbehave(self, answer: web.StreamResponse) -> None:
        if self.fault == "nonsense":
            await answer.write(b"data: {oops\n\n")
        elif self.fault == "error event":
            await self.send(answer, {"error": {"message": "too late", "code": "expired"}})
            raise EOFError
        elif self.fault == "silent":
            await asyncio.sleep(1)

    async def send(self, answer: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def openai_peer(fault: str = "") -> AsyncIterator[OpenAIPeer]:
    here = OpenAIPeer(fault)
    app = web.Application()
    app.add_routes([
        web.get("/v1/models", here.models),
        web.post("/v1/completions", here.complete),
        web.post("/v1/chat/completions", here.complete),
    ])  # fmt: skip
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    here.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield here
    finally:
        await runner.cleanup()
