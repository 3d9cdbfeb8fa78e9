"""Serves /metrics from a thread of its own, so that a blocked event loop can still be seen from outside."""

from __future__ import annotations

import socket
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

_SHUTDOWN_POLL_S = 0.1


def serve(registry: CollectorRegistry, *, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Starts serving; returns the bound port, and what closes it (blocks for up to 0.1 s).

    Raises OSError when the port is taken.
    """
    cls = _Server6 if ":" in host else _Server
    server = make_server(host, port, make_wsgi_app(registry), server_class=cls, handler_class=_QuietHandler)
    thread = Thread(target=server.serve_forever, args=(_SHUTDOWN_POLL_S,), name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # As HTTPServer does, but without asking DNS for our own name, which can take many seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.socket.getsockname()[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # seconds for a peer to send its request

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Says nothing: a scrape is no event."""
