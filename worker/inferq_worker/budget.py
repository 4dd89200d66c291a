"""What may be in hand at once against the memory there is. Pure: figures in, windows or a start-up error out.

RabbitMQ knows windows in messages only, so bytes are bounded by messages times the largest body. Values that nobody has
set are lowered to fit; those that somebody has set are meant, and a contradiction is an error with its mend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferq.configuration import ConfigurationError
from inferq_worker.work import WINDOW_MAX, WINDOW_MIN

if TYPE_CHECKING:
    from inferq_worker.settings import LanesSettings, MemorySettings, WorkerSettings

MIB = 2**20
_LEAST_HELD_BYTES = 8 * MIB
_LEAST_BODY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Use:
    """What takes memory whatever the windows are, and who shares the rest.

    Attributes:
        limit_bytes: what the process may have.
        idle_bytes: what it has with all models loaded and warm, and nothing in hand.
        urgent_lanes: lanes that never pause.
        patient_lanes: lanes that pause above `lanes.max_held_bytes`, and the dead-letter queue.
    """

    limit_bytes: int
    idle_bytes: int
    urgent_lanes: int
    patient_lanes: int


@dataclass(frozen=True, slots=True)
class Windows:
    """How much may be in hand.

    Attributes:
        lanes: the settings, lowered where that was needed and allowed.
        most_urgent: messages that the window of an urgent lane may ever hold.
        most_patient: the same of any other lane.
        lowered: knobs, each with what it was and what it is.
    """

    lanes: LanesSettings
    most_urgent: int = WINDOW_MAX
    most_patient: int = WINDOW_MAX
    lowered: tuple[tuple[str, int, int], ...] = ()


def limit_of(settings: MemorySettings, container_bytes: int | None) -> int | None:
    """Memory that the process may have: the lower of what is set and its share of the container's; None = no limit."""
    limits = [] if settings.limit_bytes is None else [settings.limit_bytes]
    if container_bytes is not None and settings.limit_share:
        limits.append(int(container_bytes * settings.limit_share))
    return min(limits, default=None)


def fit(settings: WorkerSettings, use: Use) -> Windows:
    """Divide what the models leave among fetched inputs, messages of urgent lanes, and messages of the others.

    `lanes.max_held_bytes` are for inputs fetched from Redis, by default at most a third; the rest is halved.

    Raises:
        ConfigurationError: it does not fit; the message says what would.
    """
    lanes, body_bytes = settings.lanes, settings.limits.body_bytes
    room_bytes = _room_bytes(settings, use)
    held_bytes = lanes.max_held_bytes
    if "max_held_bytes" not in lanes.model_fields_set:
        held_bytes = min(held_bytes, room_bytes // 3)
    messages = (room_bytes - held_bytes) // body_bytes
    most_patient = min(WINDOW_MAX, max(1, messages // 2 // use.patient_lanes))
    most_urgent = min(WINDOW_MAX, (messages - most_patient * use.patient_lanes) // use.urgent_lanes)
    if held_bytes < _LEAST_HELD_BYTES or most_urgent < WINDOW_MIN:
        raise ConfigurationError(_too_small(settings, use, held_bytes))
    most = {
        "max_held_bytes": held_bytes,
        "interactive_window": most_urgent,
        "bulk_window": most_patient,
        "dead_window": most_patient,
    }
    lowered = {knob: value for knob, value in most.items() if value < getattr(lanes, knob)}
    set_by_hand = [knob for knob in lowered if knob in lanes.model_fields_set]
    if set_by_hand:
        raise ConfigurationError(
            "\n".join(_contradiction(settings, use, knob, lowered[knob], held_bytes) for knob in set_by_hand)
        )
    return Windows(
        lanes.model_copy(update=lowered),
        most_urgent,
        most_patient,
        tuple((f"lanes.{knob}", getattr(lanes, knob), value) for knob, value in lowered.items()),
    )


def _room_bytes(settings: WorkerSettings, use: Use) -> int:
    """What is left for messages and fetched inputs. A run gathers its inputs once more."""
    return use.limit_bytes - use.idle_bytes - settings.batching.max_bytes


def _contradiction(settings: WorkerSettings, use: Use, knob: str, value: int, held_bytes: int) -> str:
    wanted, body_bytes = getattr(settings.lanes, knob), settings.limits.body_bytes
    sharers = use.urgent_lanes if knob == "interactive_window" else use.patient_lanes
    fitting_bytes = (_room_bytes(settings, use) - held_bytes) // 2 // sharers // wanted
    return (
        f"lanes.{knob} = {wanted} messages of up to limits.body_bytes = {body_bytes} do not fit into what the loaded "
        f"models leave of the memory limit of {_mib(use.limit_bytes)}; lower it to {value}, or limits.body_bytes to "
        f"{fitting_bytes}, or give the worker more memory"
    )


def _too_small(settings: WorkerSettings, use: Use, held_bytes: int) -> str:
    body_bytes, room_bytes = settings.limits.body_bytes, _room_bytes(settings, use)
    messages = max(2 * WINDOW_MIN * use.urgent_lanes, use.patient_lanes + WINDOW_MIN * use.urgent_lanes)
    given = "max_held_bytes" in settings.lanes.model_fields_set
    needed_bytes = messages * body_bytes + (held_bytes if given else messages * body_bytes // 2)
    needed_bytes = max(needed_bytes, 3 * _LEAST_HELD_BYTES) + use.limit_bytes - room_bytes
    fitting_bytes = (room_bytes - held_bytes) // messages
    helps = held_bytes >= _LEAST_HELD_BYTES and fitting_bytes >= _LEAST_BODY_BYTES
    return (
        f"the memory limit is {_mib(use.limit_bytes)}, of which the loaded models take {_mib(use.idle_bytes)} and a "
        f"batch up to {_mib(settings.batching.max_bytes)} (batching.max_bytes); too little is left for messages and "
        f"for lanes.max_held_bytes: let the worker have at least {_mib(needed_bytes)} (memory.limit_bytes, or "
        "memory.limit_share of what its container has)"
        + (f", or lower limits.body_bytes from {body_bytes} to {fitting_bytes}" if helps else "")
    )


def _mib(size: int) -> str:
    return f"{math.ceil(size / MIB)} MiB"
