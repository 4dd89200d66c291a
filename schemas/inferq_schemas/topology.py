"""The broker topology as data: what exists, the definitions file that creates it, and the exact diff against a broker.

Queues carry `x-queue-type: quorum` and nothing else; every behaviour is a policy, because arguments cannot be changed
on a living queue. Uses only what RabbitMQ 3.10 and 4.x both take. Opens no connection.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from inferq_schemas.errors import ContractError, shorten
from inferq_schemas.job import MODEL_PATTERN

JOBS_EXCHANGE: Final = "inferq.jobs"
FALLBACK_EXCHANGE: Final = "inferq.fallback"
DEAD_EXCHANGE: Final = "inferq.dead"
PARKING_EXCHANGE: Final = "inferq.parking"
REPLIES_EXCHANGE: Final = "inferq.replies"
DEAD_QUEUE: Final = "inferq.dead"
PARKING_QUEUE: Final = "inferq.parking"
FALLBACK_LANE: Final = "fallback"
DEFAULT_LANES: Final = ("interactive", "bulk")
BUNDLE_LANES: Final = frozenset({"bulk"})
# "fallback" fits the pattern, and is refused where a lane is meant: that queue is the CPU's.
LANE_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,31}$"

DELIVERY_LIMIT: Final = 20
LANE_MAX_BYTES: Final = 4 * 2**30
PARKING_MAX_BYTES: Final = 2**30
# Every look at a parked message counts as a delivery of it. A quorum queue without a limit of its own has one of 20 on
# RabbitMQ 4.x, and drops the message then; 3.10 refuses -1 ("none") in a policy.
PARKING_DELIVERY_LIMIT: Final = 2**31 - 1

_MODEL = re.compile(MODEL_PATTERN)
_LANE = re.compile(LANE_PATTERN)
# Inside a PCRE pattern of a policy. Job queues have two dots, inferq.dead and inferq.parking have one.
ANY_MODEL: Final = "[a-z0-9][a-z0-9_-]*"
ANY_LANE: Final = "(?!fallback$)[a-z0-9][a-z0-9_-]*"


def lane_queue(model: str, lane: str) -> str:
    """Name of the queue behind a lane.

    Raises:
        ContractError: `malformed`, an unfit model or lane.
    """
    return f"inferq.{routing_key(model, lane)}"


def fallback_queue(model: str) -> str:
    """Name of the queue that the CPU role reads for a model."""
    return f"inferq.{_checked_model(model)}.{FALLBACK_LANE}"


def routing_key(model: str, lane: str) -> str:
    """Routing key of a job; it stays the same through every dead-letter hop."""
    return f"{_checked_model(model)}.{_checked_lane(lane)}"


def parse_routing_key(key: str) -> tuple[str, str]:
    """Model and lane of a routing key.

    Raises:
        ContractError: `malformed`, the key is not `<model>.<lane>`.
    """
    model, _, lane = key.partition(".")
    return _checked_model(model), _checked_lane(lane)


def _checked_model(model: str) -> str:
    if not _MODEL.fullmatch(model):
        raise ContractError("malformed", f"model {shorten(model, 80)!r} does not match {MODEL_PATTERN}")
    return model


def _checked_lane(lane: str) -> str:
    if not _LANE.fullmatch(lane):
        raise ContractError("malformed", f"lane {shorten(lane, 80)!r} does not match {LANE_PATTERN}")
    if lane == FALLBACK_LANE:
        raise ContractError("malformed", 'a lane cannot be called "fallback": that queue is filled by the broker alone')
    return lane


@dataclass(frozen=True)
class ModelTopology:
    """What one model has on the broker.

    Args:
        model: its name.
        lanes: at least one, each once.
        fallback: whether a CPU role is deployed for it; without one, expired jobs go to `inferq.dead`.

    Raises:
        ContractError: an unfit name, no lane, or a lane twice.
    """

    model: str
    lanes: tuple[str, ...] = DEFAULT_LANES
    fallback: bool = True

    def __post_init__(self) -> None:
        _checked_model(self.model)
        if not self.lanes or len({_checked_lane(lane) for lane in self.lanes}) != len(self.lanes):
            raise ContractError("malformed", f"model {self.model}: needs at least one lane, and each once")


@dataclass(frozen=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: Literal["topic", "fanout", "direct"]

    def to_definition(self) -> dict[str, Any]:
        """As in a definitions file, without the vhost."""
        flags = {"durable": True, "auto_delete": False, "internal": False, "arguments": {}}
        return {"name": self.name, "type": self.type, **flags}


@dataclass(frozen=True)
class Queue:
    """A durable quorum queue."""

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The only argument that any of our queues has."""
        return {"x-queue-type": "quorum"}

    def to_definition(self) -> dict[str, Any]:
        """As in a definitions file, without the vhost."""
        return {"name": self.name, "durable": True, "auto_delete": False, "arguments": self.arguments}


@dataclass(frozen=True)
class Binding:
    """From an exchange to a queue."""

    source: str
    destination: str
    routing_key: str

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"{self.source} -> {self.destination} ({self.routing_key!r})"

    def to_definition(self) -> dict[str, Any]:
        """As in a definitions file, without the vhost."""
        return {
            "source": self.source,
            "destination": self.destination,
            "destination_type": "queue",
            "routing_key": self.routing_key,
            "arguments": {},
        }


@dataclass(frozen=True)
class Policy:
    """Behaviour of all queues whose name matches a PCRE pattern; of several, the highest priority applies alone."""

    name: str
    pattern: str
    priority: int
    definition: Mapping[str, Any] = field(hash=False)

    def to_definition(self) -> dict[str, Any]:
        """As in a definitions file, without the vhost."""
        return {
            "name": self.name,
            "pattern": self.pattern,
            "apply-to": "queues",  # 3.10 refuses "quorum_queues"
            "priority": self.priority,
            "definition": dict(self.definition),
        }


def _kept(dead_letter_exchange: str, **more: int) -> dict[str, Any]:
    """Nothing is lost: dead letters move at least once, and a full queue refuses instead of dropping.

    At-least-once works only together with reject-publish and a dead-letter exchange; otherwise it silently is not.
    """
    return {
        "dead-letter-exchange": dead_letter_exchange,
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
        "delivery-limit": DELIVERY_LIMIT,
        **{key.replace("_", "-"): value for key, value in more.items()},
    }


@dataclass(frozen=True)
class Topology:
    """Everything that inferq needs on a broker, for a set of models.

    Args:
        models: each once; kept in the order of their names, so that equal topologies give equal files.

    Raises:
        ContractError: a model twice.
    """

    models: tuple[ModelTopology, ...] = ()

    def __init__(self, models: Iterable[ModelTopology] = ()) -> None:
        ordered = tuple(sorted(models, key=lambda entry: entry.model))
        if len({entry.model for entry in ordered}) != len(ordered):
            raise ContractError("malformed", "topology: a model is listed twice")
        object.__setattr__(self, "models", ordered)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The same for every set of models."""
        return (
            Exchange(JOBS_EXCHANGE, "topic"),
            Exchange(FALLBACK_EXCHANGE, "topic"),
            Exchange(DEAD_EXCHANGE, "topic"),
            Exchange(PARKING_EXCHANGE, "fanout"),
            Exchange(REPLIES_EXCHANGE, "direct"),
        )

    @property
    def queues(self) -> tuple[Queue, ...]:
        """Two shared ones, then per model its lanes and its fallback."""
        names = [DEAD_QUEUE, PARKING_QUEUE]
        for entry in self.models:
            names += [lane_queue(entry.model, lane) for lane in entry.lanes]
            names += [fallback_queue(entry.model)] if entry.fallback else []
        return tuple(Queue(name) for name in names)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Two shared ones, then per model its lanes and its fallback."""
        found = [Binding(DEAD_EXCHANGE, DEAD_QUEUE, "#"), Binding(PARKING_EXCHANGE, PARKING_QUEUE, "")]
        for entry in self.models:
            keys = [routing_key(entry.model, lane) for lane in entry.lanes]
            found += [Binding(JOBS_EXCHANGE, f"inferq.{key}", key) for key in keys]
            if entry.fallback:
                found.append(Binding(FALLBACK_EXCHANGE, fallback_queue(entry.model), f"{entry.model}.*"))
        return tuple(found)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Four shared ones, then one per model without fallback."""
        lanes = f"^inferq\\.{ANY_MODEL}\\.{ANY_LANE}$"
        shared = (
            Policy("inferq-lanes", lanes, 10, _kept(FALLBACK_EXCHANGE, max_length_bytes=LANE_MAX_BYTES)),
            # No length limit: what the lanes shed must always find room here.
            Policy("inferq-fallback", f"^inferq\\.{ANY_MODEL}\\.fallback$", 10, _kept(DEAD_EXCHANGE)),
            Policy("inferq-dead", r"^inferq\.dead$", 10, _kept(PARKING_EXCHANGE)),
            Policy(
                "inferq-parking",
                r"^inferq\.parking$",
                10,
                {
                    "max-length-bytes": PARKING_MAX_BYTES,
                    "overflow": "drop-head",
                    "delivery-limit": PARKING_DELIVERY_LIMIT,
                },
            ),
        )
        without = _kept(DEAD_EXCHANGE, max_length_bytes=LANE_MAX_BYTES)
        own = (
            Policy(f"inferq-lanes-{entry.model}", f"^inferq\\.{entry.model}\\.{ANY_LANE}$", 20, without)
            for entry in self.models
            if not entry.fallback
        )
        return (*shared, *own)

    def definitions(self, vhost: str = "/") -> dict[str, Any]:
        """A RabbitMQ definitions file: this vhost and what is in it, no users. Equal topologies give equal files."""
        parts: tuple[tuple[str, Iterable[Exchange | Queue | Binding | Policy]], ...] = (
            ("exchanges", self.exchanges),
            ("queues", self.queues),
            ("bindings", self.bindings),
            ("policies", self.policies),
        )
        content: dict[str, Any] = {"vhosts": [{"name": vhost}]}
        for key, entries in parts:
            content[key] = [{"vhost": vhost, **entry.to_definition()} for entry in entries]
        return content
