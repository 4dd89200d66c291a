"""The management client against a real broker."""

import socket
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pytest
from tests.stack import Broker

from inferq.management import Management, ManagementError, NotFoundError, vhost_of
from inferq.provision import ensure_model
from inferq.settings import BrokerSettings
from inferq_schemas import ModelTopology, Queue, Topology, diff

pytestmark = pytest.mark.stack


def settings(url: str, management_url: str | None = None) -> BrokerSettings:
    return BrokerSettings.model_validate({"url": url, "management_url": management_url, "connect_timeout_s": 5})


@pytest.fixture
def management(broker: Broker) -> Management:
    return Management.of(settings(broker.url, broker.management_url))


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_vhost_is_that_of_the_amqp_url(management: Management, broker: Broker) -> None:
    assert management.vhost == broker.vhost
    assert management.definitions()["queues"] == []
    assert management.version().split(".")[0].isdigit()


def test_objects_appear_in_the_definitions_and_can_be_deleted_twice(management: Management) -> None:
    management.put_exchange("inferq.x", {"type": "topic", "durable": True})
    management.put_queue("inferq.q/%1", {"durable": True, "arguments": {"x-queue-type": "quorum"}})
    management.put_binding("inferq.x", "inferq.q/%1", "a.*")
    management.put_binding("inferq.x", "inferq.q/%1", "")
    policy = {"pattern": "^inferq", "definition": {"delivery-limit": 3}, "priority": 1, "apply-to": "queues"}
    management.put_policy("p", policy)
    found = management.definitions()
    assert [queue["name"] for queue in found["queues"]] == ["inferq.q/%1"]
    assert sorted(binding["routing_key"] for binding in found["bindings"]) == ["", "a.*"]
    assert found["policies"][0]["definition"] == {"delivery-limit": 3}
    for _ in range(2):
        management.delete_binding("inferq.x", "inferq.q/%1", "a.*")
        management.delete_binding("inferq.x", "inferq.q/%1", "")
        assert management.definitions()["bindings"] == []
        management.delete_policy("p")
        management.delete_queue("inferq.q/%1")
        management.delete_exchange("inferq.x")
    assert [management.definitions()[key] for key in ("queues", "bindings", "policies")] == [[], [], []]


def test_a_queue_that_exists_is_described_and_another_is_none(management: Management) -> None:
    management.put_queue("q", {"durable": True, "arguments": Queue("q").arguments})
    found = management.queue("q")
    assert found is not None
    assert found["name"] == "q"
    assert management.queue("nope") is None


def test_a_queue_with_other_arguments_is_refused_with_the_brokers_reason(management: Management) -> None:
    management.put_queue("q", {"durable": True, "arguments": {}})
    with pytest.raises(ManagementError, match="x-queue-type"):
        management.put_queue("q", {"durable": True, "arguments": {"x-queue-type": "quorum"}})


def test_a_bad_policy_is_refused_with_the_brokers_reason(management: Management) -> None:
    bad = {"pattern": "x", "definition": {"no-such-key": 1}, "priority": 1, "apply-to": "queues"}
    with pytest.raises(ManagementError, match="no-such-key"):
        management.put_policy("p", bad)


def test_a_wrong_password_names_the_user_and_not_the_password(broker: Broker) -> None:
    place = urlsplit(broker.management_url)
    url = f"http://somebody:hunter2@{place.hostname}:{place.port}"
    with pytest.raises(ManagementError, match="'somebody'") as caught:
        Management.of(settings(broker.url, url)).definitions()
    assert "hunter2" not in str(caught.value)


def test_a_user_with_the_tag_management_may_read_all_and_a_policymaker_may_bring_a_model(broker: Broker) -> None:
    place = urlsplit(broker.management_url)
    user = broker.vhost  # unique, and gone with the test
    url = f"http://{user}:hunter2@{place.hostname}:{place.port}"
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    client = Management.of(settings(broker.url, url))
    try:
        broker.management.call("PUT", f"/api/users/{user}", {"password": "hunter2", "tags": "management"})
        broker.management.call("PUT", f"/api/permissions/{broker.vhost}/{user}", everything)
        assert client.definitions()["exchanges"] == []
        with pytest.raises(ManagementError, match="policymaker for policies"):
            ensure_model(client, ModelTopology("m"))
        broker.management.call("PUT", f"/api/users/{user}", {"password": "hunter2", "tags": "policymaker"})
        ensure_model(client, ModelTopology("m"))
        assert diff(Topology((ModelTopology("m"),)), client.definitions()) == ()
    finally:
        broker.management.call("DELETE", f"/api/users/{user}")


def test_a_missing_vhost_says_how_to_create_it(broker: Broker) -> None:
    missing = urlsplit(broker.url)._replace(path="/no-such-vhost").geturl()
    with pytest.raises(NotFoundError, match="rabbitmqctl add_vhost"):
        Management.of(settings(missing, broker.management_url)).definitions()


def test_a_port_where_nothing_listens_asks_for_the_plugin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ManagementError, match="is the management plugin on"):
        Management.of(settings("amqp://u:hunter2@127.0.0.1/", f"http://127.0.0.1:{port}")).overview()


def test_a_server_that_never_answers_is_given_up_after_the_time_out(silent_port: int) -> None:
    client = Management(f"http://127.0.0.1:{silent_port}", user="u", password="hunter2", timeout_s=0.1)  # noqa: S106
    with pytest.raises(ManagementError, match=r"did not answer within 0\.1 s"):
        client.overview()


@pytest.mark.parametrize(
    ("url", "vhost"),
    [
        ("amqp://h", "/"),
        ("amqp://h/", "/"),
        ("amqp://h/%2F", "/"),
        ("amqp://h/inferq", "inferq"),
        ("amqp://h/" + quote("a/b c", safe=""), "a/b c"),
    ],
)
def test_the_vhost_of_a_url_is_what_stands_after_the_host(url: str, vhost: str) -> None:
    assert vhost_of(url) == vhost


def test_without_a_management_url_the_brokers_host_and_user_are_asked_on_the_default_port() -> None:
    client = Management.of(settings("amqp://me:p%40ss@broker.example:5999/v"))
    assert (client.url, client.user, client.vhost) == ("http://broker.example:15672", "me", "v")
    client = Management.of(settings("amqp://me:p@[::1]:5999/v", "https://other.example:8443/prefix/"))
    assert (client.url, client.user) == ("https://other.example:8443/prefix", "me")
    assert Management.of(settings("amqp://me:p@[::1]:5999/v")).url == "http://[::1]:15672"


def test_a_password_that_is_encrypted_on_its_way_to_the_broker_is_so_to_the_management_api() -> None:
    assert Management.of(settings("amqps://me:p@broker.example/v")).url == "https://broker.example:15671"
    assert Management.of(settings("amqps://me:p@[::1]/v", "http://[::1]:15672")).url == "http://[::1]:15672"
