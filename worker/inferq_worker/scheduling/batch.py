"""What a scheduling policy sees of a job, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

CloseReason: TypeAlias = Literal["full", "wait", "deadline", "idle", "shape", "drain", "solo"]


RowLimit: TypeAlias = "int | Callable[[Hashable], int]"
"""Largest batch in rows: one for all, or by bucket where several models share a device."""


def row_limit(max_rows: RowLimit) -> Callable[[Hashable], int]:
    """The limit as a function of the bucket."""
    return max_rows if callable(max_rows) else lambda _bucket: max_rows


class Entry(Protocol):
    """A job as the scheduler sees it, or one step of a large one; times are monotonic seconds.

    Attributes:
        rows: what it brings to its batch.
    """

    rows: int
    payload_bytes: int
    bucket: Hashable
    lane_rank: int
    arrived_s: float
    deadline_s: float | None
    alone: bool

    @property
    def serve_late(self) -> bool:
        """Run it even when its deadline has passed."""

    @property
    def rows_left(self) -> int:
        """Its rows, and those of the steps that come after it."""

    @property
    def started(self) -> bool:
        """A step of it came before this one."""

    def rest(self) -> Self | None:
        """The next step, once this one has been chosen to run; None after the last."""


T = TypeVar("T", bound=Entry)
T_co = TypeVar("T_co", bound=Entry, covariant=True)


@dataclass(frozen=True, slots=True)
class Batch(Generic[T_co]):
    """Jobs that run together: one bucket, in the order in which they were chosen.

    Args:
        items: at least one.
        reason: why it left now.
        opened_s: arrival of its oldest job, monotonic seconds.
    """

    items: tuple[T_co, ...]
    reason: CloseReason
    opened_s: float

    @property
    def rows(self) -> int:
        """Rows of all its jobs together."""
        return sum(item.rows for item in self.items)


@dataclass(frozen=True, slots=True)
class Poll(Generic[T_co]):
    """A policy's answer: at most one batch, the jobs whose deadline has passed, and when to ask again.

    Args:
        wake_s: monotonic seconds at which the answer changes without a new arrival; None = never.
        given_up: jobs with time left that no run could answer in time, or not without making many others late.
    """

    batch: Batch[T_co] | None
    expired: tuple[T_co, ...]
    wake_s: float | None
    given_up: tuple[T_co, ...] = ()


class Policy(Protocol[T]):
    """Holds waiting jobs and decides which leave together. Never waits; time is an argument."""

    def add(self, item: T) -> None:
        """Take a job in."""

    def discard(self, item: T) -> bool:
        """Forget a waiting job; False if it is not waiting here."""

    def poll(self, now_s: float, *, free: bool, start_s: float | None = None) -> Poll[T]:
        """Decide.

        Args:
            now_s: monotonic seconds.
            free: somebody is ready to take a batch; without it only expiry is reported.
            start_s: when its run will begin, if later than now.
        """

    def drain(self) -> tuple[T, ...]:
        """Give up everything that waits."""

    def __len__(self) -> int:
        """How many jobs wait."""
