"""The topology as data: names, definitions, and which policy takes which queue."""

import re
from typing import Any

import pytest

from inferq_schemas import (
    DEAD_QUEUE,
    DEFAULT_LANES,
    LANE_PATTERN,
    PARKING_QUEUE,
    ContractError,
    ModelTopology,
    Policy,
    Topology,
    fallback_queue,
    lane_queue,
    parse_routing_key,
    routing_key,
)

TOPOLOGY = Topology([ModelTopology("resnet"), ModelTopology("bert-base", ("interactive",), fallback=False)])


def policies_of(queue: str, topology: Topology = TOPOLOGY) -> list[Policy]:
    matching = [policy for policy in topology.policies if re.search(policy.pattern, queue)]
    return sorted(matching, key=lambda policy: -policy.priority)


def test_names_follow_from_model_and_lane() -> None:
    assert lane_queue("resnet", "bulk") == "inferq.resnet.bulk"
    assert fallback_queue("resnet") == "inferq.resnet.fallback"
    assert routing_key("resnet", "bulk") == "resnet.bulk"
    assert parse_routing_key("resnet.bulk") == ("resnet", "bulk")


@pytest.mark.parametrize(
    "key", ["", "resnet", "resnet.", ".bulk", "a.b.c", "resnet.fallback", "Resnet.bulk", "a.*", "a.b\n"]
)
def test_a_routing_key_that_is_not_model_and_lane_is_malformed(key: str) -> None:
    with pytest.raises(ContractError, match="malformed"):
        parse_routing_key(key)


def test_a_lane_cannot_take_the_name_of_the_fallback() -> None:
    assert re.fullmatch(LANE_PATTERN, "fallback")
    with pytest.raises(ContractError, match='cannot be called "fallback"'):
        ModelTopology("m", ("fallback",))
    assert lane_queue("m", "fallback-2") == "inferq.m.fallback-2"


@pytest.mark.parametrize("lanes", [(), ("bulk", "bulk"), ("Bulk",), ("a.b",)])
def test_a_model_has_at_least_one_lane_and_each_once(lanes: tuple[str, ...]) -> None:
    with pytest.raises(ContractError):
        ModelTopology("m", lanes)


def test_a_model_is_listed_once() -> None:
    with pytest.raises(ContractError, match="listed twice"):
        Topology([ModelTopology("m"), ModelTopology("m", ("bulk",))])


def test_the_order_of_models_does_not_change_the_file() -> None:
    assert Topology(reversed(TOPOLOGY.models)).definitions() == TOPOLOGY.definitions()


def test_every_job_is_routed_and_every_dead_letter_finds_a_queue() -> None:
    bindings = {(binding.source, binding.destination, binding.routing_key) for binding in TOPOLOGY.bindings}
    assert bindings == {
        ("inferq.jobs", "inferq.resnet.interactive", "resnet.interactive"),
        ("inferq.jobs", "inferq.resnet.bulk", "resnet.bulk"),
        ("inferq.jobs", "inferq.bert-base.interactive", "bert-base.interactive"),
        ("inferq.fallback", "inferq.resnet.fallback", "resnet.*"),
        ("inferq.dead", "inferq.dead", "#"),
        ("inferq.parking", "inferq.parking", ""),
    }
    assert {queue.name for queue in TOPOLOGY.queues} == {binding.destination for binding in TOPOLOGY.bindings}


def test_arguments_carry_the_queue_type_and_nothing_else() -> None:
    assert {tuple(queue.arguments.items()) for queue in TOPOLOGY.queues} == {(("x-queue-type", "quorum"),)}


@pytest.mark.parametrize(
    ("queue", "policy", "dead_letters_to"),
    [
        ("inferq.resnet.interactive", "inferq-lanes", "inferq.fallback"),
        ("inferq.resnet.bulk", "inferq-lanes", "inferq.fallback"),
        ("inferq.resnet.fallback-2", "inferq-lanes", "inferq.fallback"),
        ("inferq.bert-base.interactive", "inferq-lanes-bert-base", "inferq.dead"),
        ("inferq.resnet.fallback", "inferq-fallback", "inferq.dead"),
        ("inferq.bert-base.fallback", "inferq-fallback", "inferq.dead"),
        (DEAD_QUEUE, "inferq-dead", "inferq.parking"),
        (PARKING_QUEUE, "inferq-parking", None),
    ],
)
def test_each_queue_has_one_policy_of_highest_priority(queue: str, policy: str, dead_letters_to: str | None) -> None:
    first, *others = policies_of(queue)
    assert first.name == policy
    assert all(other.priority < first.priority for other in others)
    assert first.definition.get("dead-letter-exchange") == dead_letters_to


@pytest.mark.parametrize(
    "queue", ["inferq.deadline", "inferq.a.b.c", "reply.inferq.a.b", "inferq.replies", "xinferq.dead"]
)
def test_no_policy_takes_a_queue_that_is_not_ours(queue: str) -> None:
    assert policies_of(queue) == []


def test_a_model_named_like_a_shared_queue_does_not_collide() -> None:
    names = Topology([ModelTopology("dead"), ModelTopology("parking", fallback=False)])
    queues = [queue.name for queue in names.queues]
    assert len(set(queues)) == len(queues) == 2 + 3 + 2
    assert policies_of("inferq.dead", names)[0].name == "inferq-dead"
    assert policies_of("inferq.dead.bulk", names)[0].name == "inferq-lanes"
    assert policies_of("inferq.parking.bulk", names)[0].name == "inferq-lanes-parking"


def test_nothing_is_dropped_before_it_is_parked() -> None:
    for policy in TOPOLOGY.policies:
        kept = policy.definition.get("dead-letter-strategy") == "at-least-once"
        assert kept is (policy.name != "inferq-parking")
        assert policy.definition["overflow"] == ("reject-publish" if kept else "drop-head")
        assert "message-ttl" not in policy.definition
        # Both work together only, and 3.10 has no default limit; 4.x has 20, and a parked message may be looked at
        # for ever.
        assert policy.definition["delivery-limit"] == (20 if kept else 2**31 - 1)
    by_name = {policy.name: policy.definition for policy in TOPOLOGY.policies}
    assert "max-length-bytes" not in by_name["inferq-fallback"]
    assert by_name["inferq-lanes"]["max-length-bytes"] == 4 * 2**30
    assert by_name["inferq-parking"]["max-length-bytes"] == 2**30


def test_definitions_name_their_vhost_and_no_users() -> None:
    content: dict[str, Any] = TOPOLOGY.definitions("tenant")
    assert list(content) == ["vhosts", "exchanges", "queues", "bindings", "policies"]
    assert content["vhosts"] == [{"name": "tenant"}]
    entries = [entry for key in ("exchanges", "queues", "bindings", "policies") for entry in content[key]]
    assert {entry["vhost"] for entry in entries} == {"tenant"}
    assert {entry["apply-to"] for entry in content["policies"]} == {"queues"}


def test_without_models_only_the_shared_part_is_there() -> None:
    assert [queue.name for queue in Topology().queues] == [DEAD_QUEUE, PARKING_QUEUE]
    assert DEFAULT_LANES == ("interactive", "bulk")
