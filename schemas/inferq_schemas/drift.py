"""The exact difference between the topology and what a broker holds. Reads a definitions map; opens no connection."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from inferq_schemas.topology import REPLIES_EXCHANGE, Binding, Policy, Topology

Kind = Literal["exchange", "queue", "binding", "policy"]

_Definition = Mapping[str, Any]
_APPLY: Final = "`inferq topology apply`"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing on the broker that is not as it should be.

    Args:
        kind: of the object.
        name: of the object.
        problem: what is wrong, and the mend.
    """

    kind: Kind
    name: str
    problem: str


def diff(expected: Topology, actual: _Definition, *, vhost: str | None = None) -> tuple[Difference, ...]:
    """Compare a topology with what a broker exports.

    Args:
        expected: how it should be.
        actual: definitions as the management API exports them, of one vhost or of the whole broker.
        vhost: look only at this one's objects; None = at all (an export of one vhost does not repeat its name).

    Returns:
        All differences: missing, altered, left over (any unknown object of ours), and foreign policies that take one
        of our queues. Empty when the broker is exactly as it should be. Reply queues bound to `inferq.replies` are
        clients' own and do not count.
    """
    return (
        *_compare("exchange", expected.exchanges, _present(actual, "exchanges", vhost)),
        *_compare("queue", expected.queues, _present(actual, "queues", vhost)),
        *_compare_bindings(expected.bindings, _present(actual, "bindings", vhost)),
        *_compare("policy", expected.policies, _present(actual, "policies", vhost)),
        *_usurping_policies(expected, _present(actual, "policies", vhost)),
    )


def _present(actual: _Definition, key: str, vhost: str | None) -> list[_Definition]:
    entries: Iterable[_Definition] = actual.get(key) or ()
    return [entry for entry in entries if vhost is None or entry.get("vhost", vhost) == vhost]


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and re.match(r"inferq[.-]", name) is not None


def _compare(kind: Kind, expected: Sequence[Any], present: list[_Definition]) -> Iterable[Difference]:
    by_name = {entry.get("name"): entry for entry in present}
    for entry in expected:
        found = by_name.pop(entry.name, None)
        if found is None:
            yield Difference(kind, entry.name, f"missing; {_APPLY} creates it")
            continue
        for key, wanted in entry.to_definition().items():
            if not _same(found.get(key, _absent(key)), wanted):
                yield Difference(kind, entry.name, f"{key} is {found.get(key)!r}, should be {wanted!r}; {_mend(kind)}")
    for name in by_name:
        if _is_ours(name):
            yield Difference(kind, str(name), f"not in the topology; {_left_over(kind, str(name))}")


def _same(found: object, wanted: object) -> bool:
    # True == 1 in Python, but not on a broker.
    return type(found) is type(wanted) and found == wanted


def _absent(key: str) -> Any:
    """What an export means by leaving a key out."""
    return {"arguments": {}, "internal": False, "auto_delete": False, "priority": 0}.get(key)


def _mend(kind: Kind) -> str:
    if kind == "policy":
        return f"{_APPLY} sets it"
    return f"a living {kind} cannot be changed: drain it, delete it, then {_APPLY}"


def _left_over(kind: Kind, name: str) -> str:
    if kind == "queue" and name.count(".") == 2:
        return f"drain it and use `inferq topology remove-model {name.split('.')[1]}`, or list the model or lane"
    return "delete it if nothing uses it"


def _compare_bindings(expected: Sequence[Binding], present: list[_Definition]) -> Iterable[Difference]:
    keys = ("source", "destination", "destination_type", "routing_key")
    found = {tuple(entry.get(key) for key in keys): entry for entry in present}
    for binding in expected:
        wanted = binding.to_definition()
        entry = found.pop(tuple(wanted[key] for key in keys), None)
        if entry is None:
            yield Difference("binding", binding.name, f"missing; {_APPLY} creates it")
        elif entry.get("arguments"):
            yield Difference("binding", binding.name, "has arguments, should have none; delete it, then " + _APPLY)
    for source, destination, _, key in found:
        if _is_ours(destination) or (_is_ours(source) and source != REPLIES_EXCHANGE):
            name = Binding(str(source), str(destination), str(key)).name
            yield Difference("binding", name, "not in the topology; delete it: it copies or diverts jobs")


def _usurping_policies(expected: Topology, present: list[_Definition]) -> Iterable[Difference]:
    """Foreign policies that outrank ours on a queue: only one policy applies to a queue, so ours would be off."""
    queues = [queue.name for queue in expected.queues]
    for entry in present:
        name = str(entry.get("name"))
        if _is_ours(name) or entry.get("apply-to") == "exchanges":
            continue
        try:
            pattern = re.compile(str(entry.get("pattern")))
        except re.error:
            yield Difference("policy", name, "its pattern cannot be read here; check that it takes no inferq queue")
            continue
        taken = [queue for queue in queues if pattern.search(queue) and _outranks(entry, queue, expected.policies)]
        if taken:
            problem = (
                f"takes {taken[0]} and {len(taken) - 1} more queues from our policies; lower its priority below 10"
            )
            yield Difference("policy", name, problem)


def _outranks(entry: _Definition, queue: str, ours: Sequence[Policy]) -> bool:
    applied = max((policy.priority for policy in ours if re.search(policy.pattern, queue)), default=0)
    priority = entry.get("priority", 0)
    return not isinstance(priority, int) or priority >= applied
