"""Serving the report of a run on this machine, built again each time that it is loaded."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from verl.errors import VerlError
from verl.redaction import redact

HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """A server on the loopback interface whose only page is `build()`, at a path that cannot be guessed.

    Other users of the machine can connect to the port, but do not know the path. The `Host` header is checked, so that
    no website can read the page through a name that resolves to this machine.
    """

    daemon_threads = True

    def __init__(self, build: Callable[[], bytes], port: int = 0) -> None:
        self.build, self.path = build, f"/{secrets.token_urlsafe(24)}/"
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if not self._is_allowed():
            self._reply(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")
            return
        try:
            page = self.server.build()
        except VerlError as error:
            self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, redact(f"{error}\n").encode(), "text/plain; charset=utf-8")
            return
        self._reply(HTTPStatus.OK, page, "text/html; charset=utf-8")

    def _is_allowed(self) -> bool:
        path = urlsplit(self.path).path.encode("utf-8", "replace")
        is_known = hmac.compare_digest(path, self.server.path.encode())
        return is_known and self.headers.get("Host") in {
            f"{name}:{self.server.server_port}" for name in (HOST, "localhost")
        }

    def _reply(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: the address contains the token."""
