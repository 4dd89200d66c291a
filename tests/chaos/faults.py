"""The kinds of fault that a run may have, as data: what each needs, how long it holds, how often it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.chaos import harm
from tests.chaos.work import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chaos.harm import Harm

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        about: one line for people.
        on: which part it needs: `worker`, `broker`, `redis`, `link.broker`, `link.redis` or `load`.
        hold_s: shortest and longest time that it holds.
        harm: does it to the target of that name.
        weight: how often it is drawn, against the others.
    """

    about: str
    on: str
    hold_s: tuple[float, float]
    harm: Harm
    weight: float = 1.0


FAULTS: Final[Mapping[str, Fault]] = {
    "worker_kill": Fault("a worker is killed (SIGKILL)", "worker", (0, 0), harm.killed, 2),
    "worker_freeze": Fault("a worker stands still (SIGSTOP), then goes on", "worker", (1, 20), harm.frozen),
    "clock_jump": Fault("a worker's wall clock jumps by 45 s, and back", "worker", (1, 10), harm.clock_jumped),
    "worker_term": Fault("a worker is asked to end (SIGTERM)", "worker", (0, 0), harm.terminated),
    "term_storm": Fault("all workers are asked to end at once, some twice", "worker", (0, 0), harm.storm, 0.5),
    "broker_restart": Fault(
        "the broker is stopped cleanly and started again", "broker", (0, 5), harm.broker_stopped, 0.7
    ),
    "broker_kill": Fault("the broker is killed and started again", "broker", (0, 5), harm.broker_killed, 0.7),
    "memory_alarm": Fault("the broker's memory alarm blocks publishers", "broker", (3, 15), harm.alarm("memory"), 0.7),
    "disk_alarm": Fault("the broker's disk alarm blocks publishers", "broker", (3, 15), harm.alarm("disk"), 0.7),
    "queue_deleted": Fault(
        "an empty queue is deleted under its consumers and made again", "broker", (0, 3), harm.queue_deleted
    ),
    "redis_restart": Fault(
        "Redis is killed and comes back with its data", "redis", (0, 6), harm.redis_ended(with_data=True)
    ),
    "redis_lost": Fault(
        "Redis is killed and comes back empty", "redis", (0, 6), harm.redis_ended(with_data=False), 0.7
    ),
    "redis_full": Fault("Redis refuses every write, out of memory", "redis", (2, 10), harm.redis_full),
    "redis_freeze": Fault("Redis stands still (SIGSTOP), then goes on", "redis", (1, 8), harm.redis_frozen),
    "link_cut": Fault("connections to the broker are reset, new ones refused", "link.broker", (0, 5), harm.cut, 2),
    "link_half_open": Fault(
        "the broker sees connections end, the other side does not", "link.broker", (15, 20), harm.half_open
    ),
    "link_silent": Fault("connections to the broker stay open and carry nothing", "link.broker", (2, 20), harm.silent),
    "link_slow": Fault("the way to the broker is slow", "link.broker", (3, 10), harm.slow),
    "link_lossy": Fault("the way to the broker pauses and breaks", "link.broker", (3, 10), harm.lossy),
    "confirms_withheld": Fault(
        "what is sent to the broker arrives, its confirms do not", "link.broker", (2, 15), harm.confirms_withheld, 1.5
    ),
    "channel_closed": Fault("the broker closes channels (406)", "link.broker", (0, 0), harm.channels_closed, 1.5),
    "redis_link_cut": Fault("connections to Redis are reset, new ones refused", "link.redis", (0, 5), harm.cut),
    "redis_link_silent": Fault("connections to Redis stay open and carry nothing", "link.redis", (1, 8), harm.silent),
    "redis_link_slow": Fault("the way to Redis is slow", "link.redis", (3, 10), harm.slow),
    "row_fails": Fault("rows that make the model fail", "load", (0, 0), harm.rows(Kind.FAIL, 5)),
    "row_kills": Fault("a row that ends the process that runs it", "load", (0, 0), harm.rows(Kind.KILL, 1)),
    "row_hangs": Fault("a row whose run never ends", "load", (0, 0), harm.rows(Kind.HANG, 1)),
    "clock_skew": Fault("some senders' clocks are wrong, all along", "", (0, 0), harm.rows(Kind.RIGHT, 0), 0),
}
