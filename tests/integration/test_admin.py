"""The admin server over real sockets on loopback."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from inferq_worker.observe.admin import AdminError, AdminServer, Check

Fetch = Callable[..., tuple[int, Mapping[str, str], str]]


class Worker:
    """What the server asks; a test changes it."""

    def __init__(self) -> None:
        self.live = {"loop": Check(ok=True, age_s=0.1)}
        self.ready = {"broker": Check(ok=True), "queues": Check(ok=True)}
        self.started = {"warm_up": Check(ok=True)}
        self.status: dict[str, Any] = {"role": "gpu"}
        self.registry = CollectorRegistry()


def server_of(worker: Worker, port: int = 0, host: str = "127.0.0.1") -> AdminServer:
    return AdminServer(
        host,
        port,
        metrics_registry=worker.registry,
        live=lambda: worker.live,
        ready=lambda: worker.ready,
        started=lambda: worker.started,
        status=lambda: worker.status,
    )


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def server(worker: Worker) -> Iterator[AdminServer]:
    with server_of(worker) as running:
        yield running


@pytest.fixture
def fetch(server: AdminServer) -> Fetch:
    def get(path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    return get


@pytest.mark.parametrize("probe", ["/livez", "/readyz", "/startupz"])
def test_a_probe_whose_checks_hold_is_200(probe: str, fetch: Fetch) -> None:
    status, headers, body = fetch(probe)
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["ok"] is True


def test_a_failed_check_is_503_with_its_reason_and_the_other_probes_stay(worker: Worker, fetch: Fetch) -> None:
    worker.ready["broker"] = Check(ok=False, reason="no connection: refused", age_s=3.5)
    status, _, body = fetch("/readyz?verbose")
    assert status == 503
    checks = json.loads(body)["checks"]
    assert checks["broker"] == {"ok": False, "reason": "no connection: refused", "age_s": 3.5}
    assert checks["queues"]["ok"] is True
    assert fetch("/livez")[0] == 200


def test_a_check_that_cannot_be_asked_fails_without_showing_why(
    worker: Worker, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.live = None  # type: ignore[assignment]  # breaks the probe
    status, _, body = fetch("/livez")
    assert status == 503
    assert "Traceback" not in body
    assert "NoneType" not in body
    assert "admin page /livez failed" in caplog.text


def test_metrics_come_in_the_format_that_the_scraper_asks_for(worker: Worker, fetch: Fetch) -> None:
    Counter("inferq_x_total", "x.", registry=worker.registry).inc()
    status, headers, body = fetch("/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert "inferq_x_total 1.0" in body
    _, headers, body = fetch("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_the_status_page_masks_secrets(worker: Worker, fetch: Fetch) -> None:
    worker.status = {"broker": {"url": "amqp://u:hunter2@h/", "password": "hunter2"}, "odd": {1}}
    status, _, body = fetch("/status")
    assert status == 200
    assert "hunter2" not in body
    assert json.loads(body)["broker"]["url"] == "amqp://u:**********@h/"


def test_an_unknown_page_is_404_and_names_the_known_ones(fetch: Fetch) -> None:
    status, _, body = fetch("/")
    assert status == 404
    assert "/readyz" in json.loads(body)["pages"]


def test_only_reading_is_possible(fetch: Fetch) -> None:
    assert fetch("/status", "POST")[0] == 501
    status, headers, body = fetch("/livez", "HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 0


def test_answers_come_while_another_client_says_nothing(server: AdminServer, fetch: Fetch) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert fetch("/livez")[0] == 200


def test_a_port_in_use_is_an_error_that_names_the_knob(worker: Worker, server: AdminServer) -> None:
    with pytest.raises(AdminError, match=r"Set admin\.port to a free port"):
        server_of(worker, port=server.port).start()


def test_an_address_of_another_machine_is_an_error_that_names_the_knob(worker: Worker) -> None:
    with pytest.raises(AdminError, match=r"admin\.host"):
        server_of(worker, host="192.0.2.1").start()


def test_after_closing_nothing_listens_and_no_thread_is_left(worker: Worker) -> None:
    before = set(threading.enumerate())
    server = server_of(worker).start()
    port = server.port
    assert port > 0
    server.close()
    server.close()
    assert server.port == port
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_it_listens_on_ipv6_too(worker: Worker) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with server_of(worker, host="::1") as server, socket.create_connection(("::1", server.port), timeout=1):
        pass
