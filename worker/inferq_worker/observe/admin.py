"""The admin HTTP server: /metrics, /livez, /readyz, /startupz, /status. For operators and probes, not for the world.

Runs in threads of its own, so that it answers while the event loop is stuck: that is what /livez is for. Listens on
loopback by default, reads only, and takes every answer from a callable; it decides nothing.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from prometheus_client.exposition import choose_encoder

from inferq_worker.observe.logs import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)
_JSON = "application/json; charset=utf-8"
_CLIENT_TIMEOUT_S = 10.0
_Answer: TypeAlias = tuple[HTTPStatus, str, bytes]


class AdminError(Exception):
    """The admin server cannot start; the message names the knob."""


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of a probe.

    Attributes:
        ok: whether it holds.
        reason: why, for the person who reads it at night.
        age_s: seconds since it was last seen so, where that is known.
    """

    ok: bool
    reason: str = ""
    age_s: float | None = None


Checks: TypeAlias = "Callable[[], Mapping[str, Check]]"


class AdminServer:
    """Serves the probes until it is closed; a context manager.

    The callables are called in the server's threads and must not block.

    Args:
        host: address to listen on; loopback unless a scraper is elsewhere.
        port: TCP port; 0 takes any free one, see `port`.
        metrics_registry: what /metrics shows.
        live: checks of /livez; the loop's beat and the running batch, never the broker.
        ready: checks of /readyz.
        started: checks of /startupz.
        status: what /status shows, JSON-able; secrets are masked once more on the way out.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9180,
        *,
        metrics_registry: CollectorRegistry,
        live: Checks,
        ready: Checks,
        started: Checks,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._registry = metrics_registry
        self._probes = {"/livez": live, "/readyz": ready, "/startupz": started}
        self._status = status
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port it listens on; before `start`, the one that was asked for."""
        return self._wanted_port if self._server is None else int(self._server.server_address[1])

    def start(self) -> Self:
        """Listen, and serve in a thread.

        Raises:
            AdminError: the address cannot be taken.
        """
        try:
            self._server = _Server(self._host, self._wanted_port, self)
        except OSError as error:
            raise AdminError(
                f"the admin server cannot listen on {self._host} port {self._wanted_port}: {error.strerror or error}. "
                "Set admin.port to a free port (0 takes any) and admin.host to an address of this machine"
            ) from None
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.1}, name="inferq-admin", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening; answers under way are finished by their own threads. Closing twice is harmless."""
        if self._server is None or self._thread is None:
            return
        server, thread = self._server, self._thread
        self._wanted_port = self.port
        self._server = self._thread = None
        server.shutdown()
        server.server_close()
        thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def answer(self, path: str, accept: str) -> _Answer:
        """The answer to a GET: status, content type, body."""
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path == "/status":
            return HTTPStatus.OK, _JSON, _json(redacted(dict(self._status())))
        if path in self._probes:
            return _probe(self._probes[path])
        known = ["/metrics", *self._probes, "/status"]
        return HTTPStatus.NOT_FOUND, _JSON, _json({"error": "no such page", "pages": known})


def _probe(ask: Checks) -> _Answer:
    checks = ask()
    ok = all(check.ok for check in checks.values())
    body = {"ok": ok, "checks": {name: asdict(check) for name, check in checks.items()}}
    return HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, _JSON, _json(redacted(body))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread a request. TCPServer and not HTTPServer: the latter asks DNS for the host's name when it binds."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, host: str, port: int, admin: AdminServer) -> None:
        self.admin = admin
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up or sent nonsense is no event of the worker."""
        del request
        _log.debug("admin request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S
    server_version = "inferq"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            status, content_type, body = self.server.admin.answer(path, self.headers.get("Accept", ""))
        except Exception:  # noqa: BLE001 - logged, and answered as a failed probe
            # A probe that cannot be asked must fail, and must not show a traceback to whoever asks.
            _log.exception("admin page %s failed", path)
            status, content_type = HTTPStatus.SERVICE_UNAVAILABLE, _JSON
            body = _json({"ok": False, "error": "the page could not be made; the worker's log says why"})
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name http.server calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
        """Probes come every few seconds; they are not logged."""
