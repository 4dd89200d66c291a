"""What is done to parked messages: when each leaves the queue, how fast, and what is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.fakes import VirtualTime
from tests.parked_messages import NOW_MS, message_of

from inferq import dead_work
from inferq.amqp import PublishUnknown
from inferq.commands.dead_text import summary, table
from inferq.dead_work import Drop, Work
from inferq.parking import parked
from inferq.requeue import Stays

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from inferq.parking import Parked

MESSAGES = [parked(message_of(bytes([number]), message_id=str(number))) for number in range(4)]


class Held:
    """A message in hand that writes down when it leaves the queue."""

    def __init__(self, message: Parked, journal: list[str]) -> None:
        self.message = message
        self._journal = journal

    async def take_out(self) -> None:
        self._journal.append(f"out {MESSAGES.index(self.message)}")


class Queue:
    """A parking queue out of which one message was taken by somebody else."""

    def __init__(self, journal: list[str], *, gone: Sequence[Parked] = ()) -> None:
        self._journal = journal
        self._gone = gone

    async def each(self, wanted: Sequence[Parked], *, count: int) -> AsyncGenerator[tuple[Held, Parked], None]:
        assert count == len(MESSAGES)
        for message in wanted:
            if message not in self._gone:
                yield Held(message, self._journal), message


class Action(Drop):
    """Does as it is told for each message."""

    done = "handled"

    def __init__(self, journal: list[str], errors: dict[int, Exception] | None = None) -> None:
        self._journal = journal
        self._errors = errors or {}

    async def do(self, held: Any, message: Parked) -> None:
        del held
        number = MESSAGES.index(message)
        self._journal.append(f"done {number}")
        if number in self._errors:
            raise self._errors[number]


def work_of(action: Action, told: list[tuple[str, str]], rate_per_s: float = 1e9) -> Work:
    work = Work(action, rate_per_s=rate_per_s, tell=lambda _, what, why: told.append((what, why)))
    work.meant(MESSAGES, len(MESSAGES), NOW_MS)
    return work


async def test_a_message_leaves_the_queue_only_after_the_action_is_through_with_it() -> None:
    journal: list[str] = []
    work = work_of(Action(journal), [])
    await work.do(cast("Any", Queue(journal)))
    assert journal == [f"{what} {number}" for number in range(4) for what in ("done", "out")]
    assert (work.done, work.left) == (4, False)


async def test_what_stays_and_what_is_gone_is_told_and_the_rest_goes_on() -> None:
    journal: list[str] = []
    told: list[tuple[str, str]] = []
    work = work_of(Action(journal, {1: Stays("no room")}), told)
    await work.do(cast("Any", Queue(journal, gone=MESSAGES[2:3])))
    assert journal == ["done 0", "out 0", "done 1", "done 3", "out 3"]
    assert told == [("handled", ""), ("stays parked", "no room"), ("handled", "")]
    assert work.left
    assert summary(work, dry_run=False) == ("4 parked, 4 meant: 2 handled; 1 stay: no room; 1 are not there any more")


async def test_a_publish_that_is_unknown_ends_the_work_and_its_message_stays() -> None:
    journal: list[str] = []
    work = work_of(Action(journal, {1: PublishUnknown("no confirm")}), [])
    with pytest.raises(PublishUnknown):
        await work.do(cast("Any", Queue(journal)))
    assert journal == ["done 0", "out 0", "done 1"]
    assert (work.done, work.left) == (1, True)


async def test_messages_are_handled_at_most_at_the_given_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, dead_work)
    started_s = asyncio.get_running_loop().time()
    await work_of(Action([]), [], rate_per_s=2.0).do(cast("Any", Queue([])))
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(1.5, abs=0.01)


def test_a_dry_run_tells_what_would_be_done_and_does_nothing() -> None:
    journal: list[str] = []
    told: list[tuple[str, str]] = []
    work = work_of(Action(journal), told)
    work.tell_what_would_be_done()
    assert told == [("would be handled", "")] * 4
    assert summary(work, dry_run=True) == "4 parked, 4 meant: 4 would be handled"
    assert journal == []


def test_the_table_shows_garbage_as_bytes_and_no_controls() -> None:
    lines = table([parked(message_of(b"\x1b[31m", routing_key="\x1b[1m", headers={"inferq-reason": "a\nb"}))], NOW_MS)
    assert len(lines) == 2
    assert "unreadable: 1b 5b 33 31 6d" in lines[1]
    assert lines[1].isprintable()
    assert table([], NOW_MS) == []
