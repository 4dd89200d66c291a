"""Brings the broker to the topology: creates what is missing, sets policies, removes a model's objects.

Works on the management API alone and never deletes a queue unless asked to. Whatever it cannot mend (a living queue of
another type, say) it leaves alone: `inferq_schemas.diff` names it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from inferq_schemas import FALLBACK_LANE, LANE_PATTERN, MODEL_PATTERN, ModelTopology, Policy, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from inferq.management import Management

_QUEUE = re.compile(rf"inferq\.({MODEL_PATTERN.strip('^$')})\.({LANE_PATTERN.strip('^$')})")


def policy_without_fallback(model: str) -> Policy:
    """The policy that only a model without CPU fallback has."""
    return next(policy for policy in Topology((ModelTopology(model, fallback=False),)).policies if policy.priority > 10)


def queues_of(definitions: Mapping[str, Any], model: str) -> list[str]:
    """The model's queues that the broker has, its fallback included, by name."""
    names = (str(queue["name"]) for queue in definitions.get("queues", ()))
    return sorted(name for name in names if (match := _QUEUE.fullmatch(name)) and match[1] == model)


def models_of(definitions: Mapping[str, Any]) -> dict[str, ModelTopology]:
    """The models that a broker serves, seen by the names of its queues.

    A model without a fallback queue counts as one with a fallback that is missing, unless its own policy says that it
    has none.
    """
    lanes: dict[str, set[str]] = {}
    for queue in definitions.get("queues", ()):
        if match := _QUEUE.fullmatch(str(queue["name"])):
            lanes.setdefault(match[1], set()).add(match[2])
    policies = {str(policy["name"]) for policy in definitions.get("policies", ())}
    found = {}
    for model, names in sorted(lanes.items()):
        fallback = FALLBACK_LANE in names or policy_without_fallback(model).name not in policies
        jobs = tuple(sorted(names - {FALLBACK_LANE}))
        found[model] = ModelTopology(model, jobs, fallback) if jobs else ModelTopology(model, fallback=fallback)
    return found


def only_models(definitions: Mapping[str, Any], models: Collection[str]) -> dict[str, Any]:
    """The same definitions without what belongs to other models: their queues, bindings and own policies."""
    others = models_of(definitions).keys() - set(models)
    queues = {name for model in others for name in queues_of(definitions, model)}
    policies = {policy_without_fallback(model).name for model in others}
    # A binding without its queue's model known is left in: nobody's things are everybody's.
    return {
        **definitions,
        "queues": [entry for entry in definitions.get("queues", ()) if entry["name"] not in queues],
        "bindings": [entry for entry in definitions.get("bindings", ()) if entry["destination"] not in queues],
        "policies": [entry for entry in definitions.get("policies", ()) if entry["name"] not in policies],
    }


def ensure_model(management: Management, model: ModelTopology) -> list[str]:
    """Create what a model needs, and the objects that all models share; other models are not looked at.

    Returns:
        What was done, one line an object; empty if all was there.

    Raises:
        ManagementError: the broker cannot be asked, or refuses.
    """
    return bring(management, Topology((model,)))


def bring(management: Management, expected: Topology) -> list[str]:
    """Create the missing objects of a topology and set its policies. Doing it twice does nothing the second time.

    Policies come before queues, so that no queue lives without its own for a moment, and bindings last, so that no job
    arrives before everything behind it stands. A model that got a fallback loses the policy that says it has none.

    Returns:
        What was done, one line an object.

    Raises:
        ManagementError: the broker cannot be asked, or refuses; what was done before that stays.
    """
    actual = management.definitions()
    done = _put_missing("exchange", expected.exchanges, _names(actual, "exchanges"), management.put_exchange)
    done += _put_policies(management, expected, actual)
    done += _put_missing("queue", expected.queues, _names(actual, "queues"), management.put_queue)
    keys = ("source", "destination", "routing_key")
    bound = {tuple(entry.get(key) for key in keys) for entry in actual.get("bindings", ())}
    for binding in expected.bindings:
        if (binding.source, binding.destination, binding.routing_key) not in bound:
            management.put_binding(binding.source, binding.destination, binding.routing_key)
            done.append(f"created binding {binding.name}")
    return done + _drop_policies(management, expected, actual)


def _names(definitions: Mapping[str, Any], key: str) -> set[str]:
    return {str(entry["name"]) for entry in definitions.get(key, ())}


def _put_missing(
    kind: str, expected: tuple[Any, ...], present: set[str], put: Callable[[str, Mapping[str, Any]], None]
) -> list[str]:
    done = []
    for entry in expected:
        if entry.name not in present:
            put(entry.name, _body(entry.to_definition()))
            done.append(f"created {kind} {entry.name}")
    return done


def _body(definition: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in definition.items() if key != "name"}


def _put_policies(management: Management, expected: Topology, actual: Mapping[str, Any]) -> list[str]:
    present = {entry["name"]: {**entry, "vhost": None} for entry in actual.get("policies", ())}
    done = []
    for policy in expected.policies:
        wanted = policy.to_definition()
        found = present.get(policy.name)
        if found == {**wanted, "vhost": None}:
            continue
        management.put_policy(policy.name, _body(wanted))
        done.append(f"{'created' if found is None else 'changed'} policy {policy.name}")
    return done


def _drop_policies(management: Management, expected: Topology, actual: Mapping[str, Any]) -> list[str]:
    done = []
    for model in expected.models:
        name = policy_without_fallback(model.model).name
        if model.fallback and name in _names(actual, "policies"):
            management.delete_policy(name)
            done.append(f"deleted policy {name}")
    return done


def unbind_model(management: Management, definitions: Mapping[str, Any], model: str) -> list[tuple[str, str, str]]:
    """Take a model's queues off their exchanges, so that no new job reaches them.

    Returns:
        The bindings removed, as source, queue and routing key, for putting them back.
    """
    queues = set(queues_of(definitions, model))
    bindings = [
        (str(entry["source"]), str(entry["destination"]), str(entry["routing_key"]))
        for entry in definitions.get("bindings", ())
        if entry["source"] and entry["destination"] in queues and entry["destination_type"] == "queue"
    ]
    for source, queue, key in bindings:
        management.delete_binding(source, queue, key)
    return bindings


def delete_model(management: Management, definitions: Mapping[str, Any], model: str) -> list[str]:
    """Delete a model's queues with all that is in them, and its own policy.

    Returns:
        What was done, one line an object.
    """
    queues = queues_of(definitions, model)
    for queue in queues:
        management.delete_queue(queue)
    done = [f"deleted queue {queue}" for queue in queues]
    policy = policy_without_fallback(model).name
    if policy in _names(definitions, "policies"):
        management.delete_policy(policy)
        done.append(f"deleted policy {policy}")
    return done
