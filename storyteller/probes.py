"""The storyteller's port for the operator: /metrics, /livez and /readyz, on threads of their own.

A scrape never holds up the event loop or the engine for longer than the lock of one metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


def serve_probes(host: str, port: int, unready: Callable[[], str]) -> Callable[[], None]:
    """Serves until the returned function is called. `unready` says why the service is not ready, '' where it is.

    Raises:
        OSError: the port is taken.
    """
    metrics: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]] = make_wsgi_app()

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start_response)
        reason = {"/livez": "", "/readyz": unready()}.get(path)
        status = "404 Not Found" if reason is None else "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{'not found' if reason is None else reason or 'ok'}\n".encode()]

    server = make_server(host, port, app, _Server, _Quiet)
    thread = Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return close
