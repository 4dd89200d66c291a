"""A small client of RabbitMQ's management HTTP API: definitions, queues, exchanges, bindings, policies.

Blocking; the worker calls it in a thread. Credentials go into the Authorization header and nowhere else: neither into
messages nor to a proxy or the target of a redirect. It changes what it is asked to change, one object a call.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from inferq.credentials import Login, login_of
from inferq.tls import tls_context, uses_tls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferq.settings import BrokerSettings

DEFAULT_PORT = 15672
DEFAULT_TLS_PORT = 15671


class ManagementError(Exception):
    """The management API did not do what was asked; the message says why and what to do."""


class NotFoundError(ManagementError):
    """The broker has no such object, or no such vhost."""


def vhost_of(broker_url: str) -> str:
    """The virtual host an AMQP URL names: everything after the host, decoded; `/` if nothing is there."""
    return unquote(urlsplit(broker_url).path.removeprefix("/")) or "/"


class Management:
    """The management API for one virtual host.

    Args:
        url: `http[s]://host:port[/prefix]`, without credentials.
        user: who asks; needs the tag `management` to read, `policymaker` for policies, and configure permission.
        password: never shown.
        vhost: the virtual host, decoded (`/`, `inferq`).
        timeout_s: for connecting and for each read; seconds.
        tls: for https; None means verification against the system's authorities.
    """

    def __init__(
        self,
        url: str,
        *,
        user: str,
        password: str,
        vhost: str = "/",
        timeout_s: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.user = user
        self.vhost = vhost
        self._timeout_s = timeout_s
        self._authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if url.startswith("https://"):
            handlers.append(urllib.request.HTTPSHandler(context=tls or ssl.create_default_context()))
        self._opener = urllib.request.build_opener(*handlers)

    @classmethod
    def of(cls, broker: BrokerSettings) -> Management:
        """The API that belongs to a broker: `management_url`, or RabbitMQ's usual port for it on the broker's own host.

        Where AMQP is encrypted so is the API, unless `management_url` says otherwise: the password is the same.
        Credentials that `management_url` does not name are those of AMQP, as they are at this moment.

        Raises:
            ManagementError: a file with a password or certificate cannot be used.
        """
        amqp = urlsplit(broker.url.get_secret_value())
        named = broker.management_url
        place = urlsplit(_usual_url(broker) if named is None else named.get_secret_value())
        try:
            own = broker if place.hostname == amqp.hostname else broker.model_copy(update={"server_name": None})
            tls = tls_context(own) if place.scheme == "https" else None
            login = login_of(broker)
        except OSError as error:
            raise ManagementError(f"broker.{error}") from None
        if place.username is not None:
            login = Login(unquote(place.username), unquote(place.password or ""))
        port = f":{place.port}" if place.port else ""
        return cls(
            f"{place.scheme}://{_host(place.hostname)}{port}{place.path}",
            user=login.user or "guest",
            password=login.password or "guest",
            vhost=vhost_of(broker.url.get_secret_value()),
            timeout_s=broker.connect_timeout_s,
            tls=tls,
        )

    def overview(self) -> dict[str, Any]:
        """Version, cluster name and totals, as the broker gives them."""
        return self._get("overview")

    def version(self) -> str:
        """The broker's version, such as `3.10.8`."""
        return str(self.overview().get("rabbitmq_version", "unknown"))

    def definitions(self) -> dict[str, Any]:
        """Queues, exchanges, bindings and policies of the virtual host, in the form of a definitions file.

        Put together from the lists, which a user with the tag `management` may read; the broker's own export asks for
        an administrator. What the broker makes itself (`amq.*`, default bindings) and exclusive queues are left out.
        """
        queues = self._list("queues", "name", "durable", "auto_delete", "arguments", "exclusive")
        exchanges = self._list("exchanges", "name", "type", "durable", "auto_delete", "internal", "arguments")
        ends = ("source", "destination", "destination_type", "routing_key", "arguments")
        return {
            "vhosts": [{"name": self.vhost}],
            "exchanges": [entry for entry in exchanges if not entry["name"].startswith("amq.") and entry["name"]],
            "queues": [entry for entry in queues if not entry.pop("exclusive", False)],
            "bindings": [entry for entry in self._list("bindings", *ends) if entry["source"]],
            "policies": self._list("policies", "name", "pattern", "apply-to", "priority", "definition"),
        }

    def _list(self, kind: str, *keys: str) -> list[dict[str, Any]]:
        entries = self._call("GET", kind, self.vhost, query=f"?columns={','.join(keys)}")
        if not isinstance(entries, list):
            raise ManagementError(self._strange())
        return [{"vhost": self.vhost, **{key: entry[key] for key in keys if key in entry}} for entry in entries]

    def put_exchange(self, name: str, body: Mapping[str, Any]) -> None:
        """Create an exchange (`type`, `durable`, ...), or do nothing if it is there with the same properties.

        Raises:
            ManagementError: it exists with other properties.
        """
        self._call("PUT", "exchanges", self.vhost, name, body=body)

    def put_queue(self, name: str, body: Mapping[str, Any]) -> None:
        """Create a queue (`durable`, `arguments`), or do nothing if it is there with the same properties.

        Raises:
            ManagementError: it exists with other properties or arguments.
        """
        self._call("PUT", "queues", self.vhost, name, body=body)

    def put_binding(self, exchange: str, queue: str, routing_key: str) -> None:
        """Bind a queue to an exchange; binding again does nothing."""
        body = {"routing_key": routing_key, "arguments": {}}
        self._call("POST", "bindings", self.vhost, "e", exchange, "q", queue, body=body)

    def put_policy(self, name: str, body: Mapping[str, Any]) -> None:
        """Create or replace a policy (`pattern`, `definition`, `priority`, `apply-to`)."""
        self._call("PUT", "policies", self.vhost, name, body=body)

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages; no error if it is gone already."""
        self._delete("queues", self.vhost, name)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange and its bindings; no error if it is gone already."""
        self._delete("exchanges", self.vhost, name)

    def delete_policy(self, name: str) -> None:
        """Delete a policy; no error if it is gone already."""
        self._delete("policies", self.vhost, name)

    def delete_binding(self, exchange: str, queue: str, routing_key: str) -> None:
        """Remove a binding without arguments; no error if it is gone already."""
        properties_key = quote(routing_key, safe="") or "~"
        self._delete("bindings", self.vhost, "e", exchange, "q", queue, properties_key)

    def queue(self, name: str) -> dict[str, Any] | None:
        """One queue as the broker sees it (`messages`, `consumers`, `type`, ...); None if there is none.

        Counts lag the truth by up to the statistics interval, 5 s by default.
        """
        try:
            return self._get("queues", self.vhost, name)
        except NotFoundError:
            return None

    def _get(self, *path: str) -> dict[str, Any]:
        answer = self._call("GET", *path)
        if not isinstance(answer, dict):
            raise ManagementError(self._strange())
        return answer

    def _delete(self, *path: str) -> None:
        try:
            self._call("DELETE", *path)
        except NotFoundError:
            return

    def _call(self, method: str, *path: str, body: Mapping[str, Any] | None = None, query: str = "") -> Any:
        target = "/".join(quote(part, safe="") for part in path)
        request = urllib.request.Request(  # noqa: S310 - settings admit http and https only
            f"{self.url}/api/{target}{query}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
        )
        # "Unredirected": a redirect to another host must not receive the password.
        request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, f"{method} {'/'.join(path)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ManagementError(self._unreachable(error)) from None
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise ManagementError(self._strange()) from None

    def _strange(self) -> str:
        return f"{self.url} does not answer like a RabbitMQ management API: check the address"

    def _refused(self, error: urllib.error.HTTPError, what: str) -> ManagementError:
        reason = _reason(error)
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            return ManagementError(
                f"the management API at {self.url} does not let the user {self.user!r} do this ({what}): {reason}. "
                "Check the password, the user's tags (management to read, policymaker for policies) and permissions "
                f"on vhost {self.vhost!r}"
            )
        # Brokers say either, by version and by path.
        if error.code == http.HTTPStatus.NOT_FOUND or reason == "vhost_not_found":
            return NotFoundError(
                f"the broker at {self.url} has no such object ({what}): {reason}. If the vhost {self.vhost!r} of "
                "broker.url is missing, create it with `rabbitmqctl add_vhost`"
            )
        return ManagementError(f"the broker at {self.url} refused {what} with status {error.code}: {reason}")

    def _unreachable(self, error: OSError | http.client.HTTPException) -> str:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return f"the management API at {self.url} did not answer within {self._timeout_s:g} s"
        if isinstance(cause, ConnectionRefusedError):
            return (
                f"nothing listens at {self.url}: is the management plugin on "
                "(`rabbitmq-plugins enable rabbitmq_management`)? If it listens elsewhere, set broker.management_url"
            )
        return f"the management API at {self.url} cannot be reached: {cause or type(cause).__name__}"


def _usual_url(broker: BrokerSettings) -> str:
    host = _host(urlsplit(broker.url.get_secret_value()).hostname)
    return f"https://{host}:{DEFAULT_TLS_PORT}" if uses_tls(broker) else f"http://{host}:{DEFAULT_PORT}"


def _host(hostname: str | None) -> str:
    host = hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _reason(error: urllib.error.HTTPError) -> str:
    """The reason in the API's own words; never the headers, which are ours in part."""
    try:
        answer = json.loads(error.read())
    except (ValueError, OSError, http.client.HTTPException):
        return str(error.reason)
    reason = answer.get("reason") if isinstance(answer, dict) else None
    return str(reason or error.reason)
