"""Serves the page of a run, or of all runs, to browsers on this machine, and to nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stagewright.errors import UserError

_LOOPBACK = "127.0.0.1"
_NAMES = (_LOOPBACK, "localhost")
FRESH = 1.0  # seconds before a page is made again


class PageServer(ThreadingHTTPServer):
    """Serves pages on loopback; each is made on request, but at most once per second.

    `make_page` gets the path of a request, such as `/`, and returns its page, or None where there is none.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, make_page: Callable[[str], str | None]) -> None:
        self._make_page = make_page
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[float, bytes]] = {}  # when each was made
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"can't serve on port {port}: {reason}; give another port, or --serve alone for any free one"
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in _NAMES}

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.server_port}/"

    def page(self, path: str) -> bytes | None:
        with self._lock:
            now = time.monotonic()
            self._pages = {name: made for name, made in self._pages.items() if now - made[0] <= FRESH}
            if path not in self._pages:
                page = self._make_page(path)
                if page is None:
                    return None
                self._pages[path] = (time.monotonic(), page.encode(errors="backslashreplace"))
            return self._pages[path][1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD if the request names this machine; another name may be DNS rebinding."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a connection may be idle

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this page is only for this machine\n", "text/plain")
            return
        try:
            page = self.server.page(self.path)
        except UserError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain")
            return
        if page is None:
            self._send(HTTPStatus.NOT_FOUND, b"no such page; go to /\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, page, "text/html")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "stagewright"

    def log_message(self, format: str, *arguments: object) -> None:
        """Do not log requests to the user's terminal."""
