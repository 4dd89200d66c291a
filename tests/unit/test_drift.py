"""The exact diff between the topology and a broker's export."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from inferq_schemas import ModelTopology, Topology, diff

TOPOLOGY = Topology([ModelTopology("resnet"), ModelTopology("bert", fallback=False)])


def exported() -> dict[str, Any]:
    """As the management API exports one vhost: with defaults left in or out, and other people's objects."""
    content = deepcopy(TOPOLOGY.definitions())
    content |= {"rabbit_version": "3.10.8", "parameters": [], "users": []}
    content["queues"].append({"name": "orders", "durable": True, "auto_delete": False, "arguments": {}})
    content["exchanges"].append({"name": "amq.topic", "type": "topic", "durable": True})
    content["policies"].append({"name": "all", "pattern": "", "apply-to": "all", "priority": 0, "definition": {}})
    content["policies"].append(
        {"name": "x", "pattern": ".*", "apply-to": "exchanges", "priority": 99, "definition": {}}
    )
    content["bindings"].append(
        {"source": "inferq.replies", "destination": "reply.a", "destination_type": "queue", "routing_key": "a"}
    )
    return content


def find(content: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(entry for entry in content[kind] if entry.get("name") == name)


def test_a_broker_that_is_exactly_right_has_no_differences() -> None:
    assert diff(TOPOLOGY, exported()) == ()
    assert diff(TOPOLOGY, exported(), vhost="/") == ()


def test_an_empty_broker_lacks_everything() -> None:
    expected = TOPOLOGY
    total = sum(map(len, (expected.exchanges, expected.queues, expected.bindings, expected.policies)))
    differences = diff(expected, {})
    assert len(differences) == total
    assert {entry.problem for entry in differences} == {"missing; `inferq topology apply` creates it"}


def test_objects_of_another_vhost_do_not_count() -> None:
    assert len(diff(TOPOLOGY, exported(), vhost="tenant")) > 20


def policy(name: str, pattern: str, priority: int) -> Callable[[dict[str, Any]], None]:
    entry = {"name": name, "pattern": pattern, "apply-to": "queues", "priority": priority, "definition": {}}
    return lambda content: content["policies"].append(entry)


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], tuple[str, str], str]] = [
    (
        lambda c: find(c, "queues", "inferq.resnet.bulk")["arguments"].update({"x-max-length": 5}),
        ("queue", "inferq.resnet.bulk"),
        "arguments is",
    ),
    (
        lambda c: find(c, "queues", "inferq.resnet.bulk").update(arguments={"x-queue-type": "classic"}),
        ("queue", "inferq.resnet.bulk"),
        "drain it, delete it",
    ),
    (
        lambda c: find(c, "queues", "inferq.resnet.bulk").update(durable=1),
        ("queue", "inferq.resnet.bulk"),
        "durable is 1, should be True",
    ),
    (
        lambda c: find(c, "exchanges", "inferq.jobs").update(type="direct"),
        ("exchange", "inferq.jobs"),
        "type is 'direct', should be 'topic'",
    ),
    (
        lambda c: find(c, "policies", "inferq-lanes")["definition"].pop("dead-letter-strategy"),
        ("policy", "inferq-lanes"),
        "definition is",
    ),
    (
        lambda c: find(c, "policies", "inferq-lanes").update(priority=11),
        ("policy", "inferq-lanes"),
        "`inferq topology apply` sets it",
    ),
    (
        lambda c: c["queues"].append({"name": "inferq.old.bulk"}),
        ("queue", "inferq.old.bulk"),
        "`inferq topology remove-model old`",
    ),
    (
        lambda c: c["exchanges"].append({"name": "inferq.retry"}),
        ("exchange", "inferq.retry"),
        "not in the topology; delete it",
    ),
    (
        lambda c: c["bindings"].append(
            {"source": "inferq.jobs", "destination": "spy", "destination_type": "queue", "routing_key": "#"}
        ),
        ("binding", "inferq.jobs -> spy ('#')"),
        "copies or diverts jobs",
    ),
    (
        lambda c: c["bindings"].append(
            {"source": "amq.topic", "destination": "inferq.dead", "destination_type": "queue", "routing_key": "#"}
        ),
        ("binding", "amq.topic -> inferq.dead ('#')"),
        "copies or diverts jobs",
    ),
    (
        lambda c: c["bindings"].remove(next(b for b in c["bindings"] if b["routing_key"] == "resnet.*")),
        ("binding", "inferq.fallback -> inferq.resnet.fallback ('resnet.*')"),
        "missing",
    ),
    (
        lambda c: next(b for b in c["bindings"] if b["routing_key"] == "resnet.*").update(arguments={"x-match": "all"}),
        ("binding", "inferq.fallback -> inferq.resnet.fallback ('resnet.*')"),
        "has arguments",
    ),
    (policy("inferq-old", "^never$", 1), ("policy", "inferq-old"), "not in the topology"),
    (policy("theirs", "bulk$", 10), ("policy", "theirs"), "takes inferq.resnet.bulk"),
    (policy("theirs", "^inferq", 15), ("policy", "theirs"), "and 4 more queues"),
    (policy("theirs", "(?<=a+)b", 15), ("policy", "theirs"), "cannot be read here"),
]


@pytest.mark.parametrize(("change", "where", "problem"), CHANGES, ids=[f"{i}-{c[1][1]}" for i, c in enumerate(CHANGES)])
def test_each_deviation_is_one_difference_with_its_mend(
    change: Callable[[dict[str, Any]], Any], where: tuple[str, str], problem: str
) -> None:
    content = exported()
    change(content)
    (difference,) = diff(TOPOLOGY, content)
    assert (difference.kind, difference.name) == where
    assert problem in difference.problem


def test_a_foreign_policy_below_ours_does_no_harm() -> None:
    content = exported()
    policy("theirs", ".*", 9)(content)
    assert diff(TOPOLOGY, content) == ()
