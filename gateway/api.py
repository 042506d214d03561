"""HTTP: the page, probes, and OpenAI's API, on a port of its own in the same process.

Every answer has a deadline, whatever its client does; every error under `/v1/` is OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import metrics, openai
from gateway.answers import Answers, deadline, error_response, refused
from gateway.config import Config
from gateway.openai import ApiError, Asked, BrokenOffError
from gateway.stories import Stories
from gateway.strangers import Origins, bound, keep_out_of_log
from gateway.wishes import RefusedError

log = logging.getLogger("gateway")

PAGE = Path(str(files(__package__))) / "page"
MAX_BODY = 256 * 1024
READ_S = 10
"""A request whose body is not there after so long is given up."""
KEEPALIVE_S = 75
ASK_PATHS = ("/v1/completions", "/v1/chat/completions")
OUTCOMES = {
    "unsupported_parameter": "bad_request",
    "invalid_api_key": "unauthorized",
    "model_not_found": "not_found",
}
"""How an ask is counted that was refused with a code of OpenAI's own."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(self, config: Config, stories: Stories) -> None:
        self._config = config
        self._stories = stories
        self._answers = Answers(stories)
        self._origins = Origins(config)
        self._keys = [key.encode() for key in config.allowed_api_keys]
        self._since = int(time.time())
        self._runner: web.AppRunner | None = None
        self.is_draining = False

    async def start(self) -> None:
        """Opens the door. `OSError`: the port is taken."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/", self._index),
                web.static("/page", PAGE),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=2, keepalive_timeout=KEEPALIVE_S
        )
        keep_out_of_log()
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.http_port, backlog=1024).start()

    async def drain(self, limit_s: float) -> None:
        """Lets running answers end, up to the limit; new asks are refused, probes are answered until the end."""
        self.is_draining = True
        await self._answers.drain(limit_s)
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns whatever happens into an answer, and gives every answer its deadline."""
        bound(request.transport)
        try:
            response = await self._answer(request, handler)
            async with deadline(request):
                await response.prepare(request)
                await response.write_eof()
        except ConnectionError:
            return web.Response(status=499)  # nobody is there to read it
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_api = request.path.startswith("/v1/")
        try:
            if is_api:
                self._let_in(request)
            return await handler(request)
        except ApiError as error:
            failure = error
        except RefusedError as error:
            failure = refused(error)
        except web.HTTPException as error:
            if not is_api:
                raise
            failure = _failure(error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a request failed")
            failure = ApiError("failed", "an error of the gateway")
        if request.path in ASK_PATHS and not isinstance(failure, BrokenOffError):
            metrics.asks.labels(OUTCOMES.get(failure.code, failure.code)).inc()
        return error_response(failure)

    def _let_in(self, request: web.Request) -> None:
        """Whose page sends it, and who is it? Every key is compared in full, so that time tells nothing."""
        if not self._origins.allow(request.headers.get("Origin"), request.headers.get("Host", "")):
            raise ApiError("forbidden", "this page may not use this gateway: see GATEWAY_ORIGINS")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        is_known = sum(hmac.compare_digest(given, key) for key in self._keys) > 0
        if self._keys and not (is_known and scheme.lower() == "bearer"):
            raise ApiError("invalid_api_key", "expected one of this gateway's keys as a bearer token")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, openai.read_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, openai.read_chat)

    async def _complete(self, request: web.Request, read: Callable[[bytes], Asked]) -> web.StreamResponse:
        if self.is_draining:
            raise ApiError("busy", "this gateway is draining", retry_after_s=1)
        # Whatever model is named, the one that is here answers, and its answer says which: tools insist on names.
        return await self._answers.give(request, read(await _body(request)))

    async def _models(self, request: web.Request) -> web.Response:
        house = self._stories.houses.house
        cards = [openai.model_card(house, self._since)] if house else []
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        house, name = self._stories.houses.house, request.match_info["model"]
        if house is None or name != house.model:
            raise ApiError("model_not_found", f"model: expected one of /v1/models, got {name[:100]}")
        return web.json_response(openai.model_card(house, self._since))

    async def _livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = "draining" if self.is_draining else self._stories.unready
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def _health(self, request: web.Request) -> web.Response:
        house = self._stories.houses.house
        return web.json_response(
            {"model": house.model if house else None, "revision": house.revision if house else None}
        )

    async def _index(self, request: web.Request) -> web.Response:
        host = (request.url.host or "localhost") if ":" not in (request.url.host or "") else f"[{request.url.host}]"
        game = f"{host}:{self._config.ws_port}"
        text = (PAGE / "index.html").read_text(encoding="utf-8").replace("{{GAME_PORT}}", str(self._config.ws_port))
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            f"connect-src 'self' ws://{game} wss://{game}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return web.Response(text=text, content_type="text/html", headers=headers)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.read()
    except TimeoutError:
        raise ApiError("bad_request", f"expected a body within {READ_S} s", status=408) from None
    except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError):
        raise ApiError("bad_request", "expected a body as its headers say, got something else") from None


def _failure(error: web.HTTPException) -> ApiError:
    """What aiohttp itself refuses, as OpenAI's error object."""
    if error.status == 413:
        return ApiError("too_long", f"expected a body of at most {MAX_BODY} bytes")
    code = "not_found" if error.status in (404, 405) else "bad_request"
    return ApiError(code, f"{error.reason}: see /v1/models, /v1/completions, /v1/chat/completions", status=error.status)
