"""`inferq topology` against a real broker."""

import asyncio
import json
from collections.abc import Callable

import aio_pika
import pytest
from tests.stack import Broker

from inferq.cli import main
from inferq.management import Management
from inferq.provision import ensure_model
from inferq.settings import BrokerSettings
from inferq_schemas import ModelTopology, Topology, diff

pytestmark = pytest.mark.stack

Topo = Callable[..., tuple[int, str]]


@pytest.fixture
def management(broker: Broker) -> Management:
    return Management.of(BrokerSettings.model_validate({"url": broker.url, "management_url": broker.management_url}))


@pytest.fixture
def topology(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs `inferq topology ...`; returns the exit status and all that was printed."""
    monkeypatch.setenv("INFERQ_BROKER__URL", broker.url)
    monkeypatch.setenv("INFERQ_BROKER__MANAGEMENT_URL", broker.management_url)

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["topology", *words])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run


def publish(broker: Broker, key: str) -> None:
    async def send() -> None:
        connection = await aio_pika.connect(broker.url)
        async with connection:
            channel = await connection.channel(publisher_confirms=True)
            exchange = await channel.get_exchange("inferq.jobs")
            await exchange.publish(aio_pika.Message(b"x"), key)

    asyncio.run(send())


def test_applying_creates_everything_and_applying_again_does_nothing(topology: Topo) -> None:
    status, text = topology("apply", "--model", "m")
    assert status == 0
    assert "created queue inferq.m.interactive\n" in text
    assert "created policy inferq-lanes\n" in text
    assert topology("apply", "--model", "m") == (0, "nothing to do: the broker has it all\n")
    assert topology("check") == (0, "the broker is as it should be for m\n")
    assert topology("check", "--model", "m")[0] == 0


def test_an_empty_broker_misses_everything(topology: Topo) -> None:
    status, text = topology("check")
    assert status == 1
    assert "queue inferq.dead: missing; `inferq topology apply` creates it" in text


def test_applying_keeps_the_models_that_the_broker_has_with_their_lanes(topology: Topo) -> None:
    assert topology("add-model", "old", "--lanes", "fast,slow", "--no-fallback")[0] == 0
    assert topology("apply", "--model", "new", "--model", "old")[0] == 0
    assert topology("check") == (0, "the broker is as it should be for new, old\n")
    assert topology("add-model", "old", "--lanes", "fast,slow", "--no-fallback")[0] == 0


def test_a_changed_policy_is_found_and_set_back(topology: Topo, management: Management) -> None:
    topology("apply", "--model", "m")
    changed = {"pattern": "^inferq", "definition": {"delivery-limit": 1}, "priority": 10, "apply-to": "queues"}
    management.put_policy("inferq-lanes", changed)
    status, text = topology("check")
    assert status == 1
    assert "policy inferq-lanes: definition is {'delivery-limit': 1}, should be" in text
    assert topology("apply") == (0, "changed policy inferq-lanes\n")
    assert topology("check")[0] == 0


def test_a_missing_binding_is_found_and_made(topology: Topo, management: Management) -> None:
    topology("apply", "--model", "m")
    management.delete_binding("inferq.jobs", "inferq.m.bulk", "m.bulk")
    status, text = topology("check")
    assert (status, text.splitlines()[-1]) == (1, "1 difference")
    assert "binding inferq.jobs -> inferq.m.bulk ('m.bulk'): missing" in text
    assert topology("apply") == (0, "created binding inferq.jobs -> inferq.m.bulk ('m.bulk')\n")


def test_a_missing_fallback_queue_is_found(topology: Topo, management: Management) -> None:
    topology("apply", "--model", "m")
    management.delete_queue("inferq.m.fallback")
    status, text = topology("check")
    assert status == 1
    assert "queue inferq.m.fallback: missing" in text


def test_a_classic_queue_is_named_with_the_mend_and_never_deleted(topology: Topo, management: Management) -> None:
    management.put_queue("inferq.m.bulk", {"durable": True, "arguments": {"x-queue-type": "classic"}})
    status, text = topology("apply", "--model", "m")
    assert status == 1
    assert "queue inferq.m.bulk: arguments is {'x-queue-type': 'classic'}, should be {'x-queue-type': 'quorum'}" in text
    assert "delete it, then `inferq topology apply --model m`" in text
    assert topology("check")[0] == 1
    management.delete_queue("inferq.m.bulk")
    assert topology("apply", "--model", "m")[0] == 0


def test_a_model_can_lose_and_regain_its_fallback(topology: Topo, management: Management) -> None:
    topology("add-model", "m", "--no-fallback")
    assert "inferq.m.fallback" not in {queue["name"] for queue in management.definitions()["queues"]}
    assert topology("check")[0] == 0
    assert topology("add-model", "m")[0] == 2
    status, text = topology("add-model", "m", "--force")
    assert status == 0
    assert "created queue inferq.m.fallback" in text
    assert "deleted policy inferq-lanes-m" in text
    status, text = topology("add-model", "m", "--no-fallback", "--force")
    assert status == 1, "the fallback queue is left over, and may hold jobs"
    assert "inferq.m.fallback" in text


def test_a_model_that_is_there_changes_only_by_force(topology: Topo, management: Management) -> None:
    topology("add-model", "m", "--lanes", "fast,slow")
    before = management.definitions()
    status, text = topology("add-model", "m", "--lanes", "slow,night", "--no-fallback")
    assert status == 2
    assert text.startswith(
        "inferq: the broker has model m, and this would change it: create the lane night; leave the lane fast over, "
        "which it has now; send its late jobs to inferq.dead, and leave its fallback queue over. Nothing was done."
    )
    assert management.definitions() == before
    assert topology("add-model", "m", "--lanes", "slow,fast")[0] == 0


def test_a_check_of_named_models_looks_at_no_other(topology: Topo) -> None:
    topology("apply", "--model", "m")
    topology("add-model", "other", "--lanes", "only", "--no-fallback")
    assert topology("check", "--model", "m") == (0, "the broker is as it should be for m\n")
    status, text = topology("check", "--model", "ghost")
    assert status == 1
    assert "other" not in text
    assert "inferq.m." not in text
    assert "queue inferq.ghost.bulk: missing; `inferq topology apply --model ghost` creates it" in text


def test_a_removed_model_is_gone_and_the_others_stay(topology: Topo, management: Management) -> None:
    topology("apply", "--model", "a", "--model", "b")
    status, text = topology("remove-model", "a")
    assert (status, text.splitlines()[0]) == (0, "deleted queue inferq.a.bulk")
    assert diff(Topology((ModelTopology("b"),)), management.definitions()) == ()
    status, text = topology("remove-model", "a")
    assert (status, text) == (2, "inferq: the broker has no queues of a model 'a'; it has: b\n")


def test_a_model_whose_queue_holds_a_job_is_removed_only_by_force(
    topology: Topo, broker: Broker, management: Management
) -> None:
    topology("apply", "--model", "a")
    publish(broker, "a.bulk")
    status, text = topology("remove-model", "a")
    assert status == 2
    assert "nothing was deleted: inferq.a.bulk holds 1 messages" in text
    assert topology("check") == (0, "the broker is as it should be for a\n")
    assert topology("remove-model", "a", "--force")[0] == 0
    assert diff(Topology(), management.definitions()) == ()


def test_a_job_that_arrives_while_the_model_is_removed_stops_it(
    topology: Topo, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology("apply", "--model", "a")
    unbind = Management.delete_binding

    def late(self: Management, exchange: str, queue: str, routing_key: str) -> None:
        if routing_key == "a.bulk":
            publish(broker, "a.bulk")
        unbind(self, exchange, queue, routing_key)

    monkeypatch.setattr(Management, "delete_binding", late)
    status, text = topology("remove-model", "a")
    assert status == 2
    assert "nothing was deleted" in text
    assert topology("check") == (0, "the broker is as it should be for a\n"), "the bindings are back"


def test_models_of_the_file_are_the_measure(topology: Topo, broker: Broker, tmp_path: object) -> None:
    models = 'topology.models={"m": {"lanes": ["only"], "fallback": false}}'
    assert topology("apply", "--set", models)[0] == 0
    assert topology("check", "--set", models)[0] == 0
    topology("add-model", "stray")
    status, text = topology("check", "--set", models)
    assert status == 1
    assert "queue inferq.stray.bulk: not in the topology" in text


def test_the_live_export_is_what_the_broker_holds(topology: Topo) -> None:
    topology("apply", "--model", "m")
    status, text = topology("export", "--live")
    assert status == 0
    assert diff(Topology((ModelTopology("m"),)), json.loads(text)) == ()


def test_ensure_model_creates_what_one_model_needs_and_then_nothing(management: Management) -> None:
    model = ModelTopology("m", ("only",), fallback=False)
    assert "created queue inferq.m.only" in ensure_model(management, model)
    assert ensure_model(management, model) == []
    assert diff(Topology((model,)), management.definitions()) == ()


def test_a_broker_without_management_is_one_message(topology: Topo) -> None:
    status, text = topology("check", "--set", "broker.management_url=http://127.0.0.1:1")
    assert status == 2
    assert text.startswith("inferq: nothing listens at http://127.0.0.1:1: is the management plugin on")
    assert len(text.splitlines()) == 1
