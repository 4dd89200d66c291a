"""The few calls of RabbitMQ's management API that bringing it up needs: is it there, load definitions, check them.

The exact comparison, which also reports what should *not* be there, is `inferq topology check`; this one runs before
the project is installed.
"""

import base64
import contextlib
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.local.errors import StackError

# What makes two objects the same one; everything else is a property that has to agree.
_KINDS = ("exchanges", "queues", "bindings", "policies")


class Management:
    """A broker's management API.

    Args:
        url: with credentials, for example `http://guest:guest@127.0.0.1:15672`.
        tls: for `https://`; None means the system's authorities.
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        self._base = f"{parts.scheme}://{host}:{parts.port or 15672}"
        user, password = (urllib.parse.unquote(text or "guest") for text in (parts.username, parts.password))
        # No proxy: this API is on the loopback, and a proxy of the environment would be asked for it.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )
        self._authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def answers(self) -> bool:
        """Tell whether the API serves requests."""
        with contextlib.suppress(OSError, ValueError):
            self.call("GET", "/api/overview")
            return True
        return False

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = 10.0) -> Any:
        """Make one request and return its decoded answer, None for an empty one.

        Raises:
            StackError: the broker refused the request; the message carries its reason.
            OSError: the broker does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data, headers, method=method)  # noqa: S310 - http to our own broker
        try:
            with self._opener.open(request, timeout=limit_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as refusal:
            with refusal:
                reason = refusal.read(1000).decode(errors="replace")
            if refusal.code < 500:
                raise StackError(f"RabbitMQ refused {method} {path}: {refusal.code} {reason}") from None
            raise
        return json.loads(text) if text else None

    def load(self, definitions: Mapping[str, Any]) -> None:
        """Import definitions and see that every object of them is there.

        RabbitMQ 3.10 can answer "ok" to a part of an import, so its word is not enough.

        Raises:
            StackError: the import was refused, or objects are missing or different.
        """
        self.call("POST", "/api/definitions", definitions, limit_s=60.0)
        absent = list(differences(definitions, self.call("GET", "/api/definitions")))
        if absent:
            raise StackError("RabbitMQ did not take these definitions: " + "; ".join(absent))


def read_definitions(path: Path) -> dict[str, Any]:
    """Read a definitions file.

    Raises:
        StackError: it is missing or not JSON.
    """
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as reason:
        raise StackError(f"cannot read the broker definitions {path}: {reason}") from None
    return loaded


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Name each expected object that the actual definitions lack or hold with other properties."""
    for kind in _KINDS:
        present = actual.get(kind, [])
        for item in expected.get(kind, []):
            if not any(all(other.get(key) == value for key, value in item.items()) for other in present):
                name = item.get("name") or f"{item['source']} -> {item['destination']} ({item['routing_key']})"
                yield f"{kind}: {name}"
