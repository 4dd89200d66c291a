"""Who may do what on a hardened broker, as data: a user for each role, with the least permissions that it works with.

RabbitMQ matches `configure`, `write` and `read` against names of queues and exchanges alike, and topic permissions
against routing keys. Nobody may write to the default exchange: that would be the right to write to any queue. So
answers travel through `inferq.replies`. Opens no connection and knows no password.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inferq_schemas.topology import (
    ANY_LANE,
    ANY_MODEL,
    DEAD_QUEUE,
    FALLBACK_EXCHANGE,
    FALLBACK_LANE,
    JOBS_EXCHANGE,
    PARKING_EXCHANGE,
    PARKING_QUEUE,
    REPLIES_EXCHANGE,
    ModelTopology,
    Topology,
)

NOTHING: Final = "^$"
_REPLY_QUEUES: Final = r"reply\.[A-Za-z0-9_.-]+"
_SHARED_QUEUES: Final = (DEAD_QUEUE, PARKING_QUEUE)
_HASHING: Final = "rabbit_password_hashing_sha256"


@dataclass(frozen=True)
class Role:
    """One user of a hardened broker.

    Args:
        user: its name, the same in RabbitMQ and in Redis.
        purpose: what it is for, in words.
        configure: regular expression of what it may create and delete.
        write: of what it may publish to, and of queues that it may bind.
        read: of what it may consume, and of exchanges that it may bind to.
        topics: by topic exchange, regular expression of the routing keys that it may publish with.
        tags: what the management API lets it do.
    """

    user: str
    purpose: str
    configure: str = NOTHING
    write: str = NOTHING
    read: str = NOTHING
    topics: Mapping[str, str] = field(default_factory=dict, hash=False)
    tags: tuple[str, ...] = ()


def roles(models: Sequence[ModelTopology] = ()) -> tuple[Role, ...]:
    """All roles.

    Args:
        models: the only ones that clients may address and workers may read; none = any model.
    """
    lanes = _lanes(models)
    fallbacks = rf"(?:{'|'.join(entry.model for entry in models) or ANY_MODEL})\.{FALLBACK_LANE}"
    keys = _whole(lanes)
    work = _names(JOBS_EXCHANGE, FALLBACK_EXCHANGE, PARKING_EXCHANGE, REPLIES_EXCHANGE)
    passes_on = {JOBS_EXCHANGE: keys, FALLBACK_EXCHANGE: keys}
    dead = re.escape(DEAD_QUEUE)
    any_queue = rf"inferq\.{ANY_MODEL}\.[a-z0-9][a-z0-9_-]*"
    shared = "|".join(map(re.escape, _SHARED_QUEUES))
    exchanges = [exchange.name for exchange in Topology().exchanges]
    return (
        Role(
            "inferq-client",
            "services and pipelines: send jobs, read the answers from a reply queue of their own",
            configure=_whole(_REPLY_QUEUES),
            write=_whole(f"{re.escape(JOBS_EXCHANGE)}|{_REPLY_QUEUES}"),
            read=_whole(f"{re.escape(REPLIES_EXCHANGE)}|{_REPLY_QUEUES}"),
            topics={JOBS_EXCHANGE: keys},
        ),
        Role(
            "inferq-gpu",
            "workers with role gpu: read the lanes, and the fallback queues while no CPU worker lives",
            write=work,
            read=_whole(rf"{dead}|inferq\.(?:{lanes}|{fallbacks})"),
            topics=passes_on,
        ),
        Role(
            "inferq-cpu",
            "workers with role cpu: read the fallback queues",
            write=work,
            read=_whole(rf"{dead}|inferq\.{fallbacks}"),
            topics=passes_on,
        ),
        Role(
            "inferq-operator",
            "people at night: look at parked jobs, drop them, send them again",
            write=_names(JOBS_EXCHANGE),
            read=_names(PARKING_QUEUE, DEAD_QUEUE),
            topics={JOBS_EXCHANGE: _whole(rf"{ANY_MODEL}\.{ANY_LANE}")},
            tags=("monitoring",),
        ),
        Role(
            "inferq-topology",
            "`inferq topology`: create and delete queues, exchanges, bindings, policies",
            configure=_whole(f"{'|'.join(map(re.escape, exchanges))}|{shared}|{any_queue}"),
            write=_whole(f"{shared}|{any_queue}"),
            read=_names(*(name for name in exchanges if name != REPLIES_EXCHANGE)),
            tags=("policymaker",),
        ),
        Role("inferq-monitoring", "Prometheus and autoscalers: figures, no messages", tags=("monitoring",)),
    )


def _lanes(models: Sequence[ModelTopology]) -> str:
    """Routing keys of the models' lanes, which end their queues' names as well."""
    each = [rf"{entry.model}\.(?:{'|'.join(entry.lanes)})" for entry in models]
    return f"(?:{'|'.join(each)})" if each else rf"{ANY_MODEL}\.{ANY_LANE}"


def _names(*names: str) -> str:
    return _whole("|".join(map(re.escape, names)))


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"


def hardened_definitions(
    topology: Topology, vhost: str = "/", *, password_hashes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A RabbitMQ definitions file with the topology, the roles' users and their permissions.

    Args:
        topology: what there is. If it has models, clients and workers may use no others.
        vhost: where.
        password_hashes: by user, salted SHA-256 as RabbitMQ stores it. A user without one cannot log in with a password
            until `rabbitmqctl change_password` gives it one.
    """
    found = roles(topology.models)
    hashes = password_hashes or {}
    content = topology.definitions(vhost)
    content["users"] = [
        {
            "name": role.user,
            "password_hash": hashes.get(role.user, ""),
            "hashing_algorithm": _HASHING,
            "tags": list(role.tags),
        }
        for role in found
    ]
    content["permissions"] = [
        {"user": role.user, "vhost": vhost, "configure": role.configure, "write": role.write, "read": role.read}
        for role in found
    ]
    content["topic_permissions"] = list(_topic_permissions(found, vhost))
    return content


def _topic_permissions(found: Iterable[Role], vhost: str) -> Iterable[dict[str, Any]]:
    for role in found:
        for exchange, keys in role.topics.items():
            yield {"user": role.user, "vhost": vhost, "exchange": exchange, "write": keys, "read": NOTHING}
