"""HTTP: the page, probes, and OpenAI's API, on a port of its own in the same process."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from aiohttp import web

from gateway.config import Config
from gateway.stories import Stories

PAGE = Path(str(files(__package__))) / "page"


class Api:
    def __init__(self, config: Config, stories: Stories) -> None:
        self._config = config
        self._stories = stories
        self.is_draining = False
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Opens the door. `OSError`: the port is taken."""
        app = web.Application(client_max_size=256 * 1024)
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/health", self._health),
                web.get("/", self._index),
                web.static("/page", PAGE),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.http_port, backlog=1024).start()

    async def drain(self, limit_s: float) -> None:
        """Lets running answers end, up to the limit."""
        if self._runner is not None:
            await self._runner.cleanup()

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
