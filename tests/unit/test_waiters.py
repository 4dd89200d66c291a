import asyncio

import pytest

from inferq.errors import ClientClosed, InvalidJob
from inferq.jobs import JobOptions, build_job
from inferq.waiters import Waiters
from inferq_schemas import Job, Result


def job(job_id: str) -> Job:
    return build_job("m", {"x": [[1]]}, JobOptions(), now_ms=1, job_id=job_id)


def ok(job_id: str) -> Result:
    return Result(job_id, "ok")


async def test_an_answer_reaches_everybody_who_waits_for_its_id() -> None:
    waiters = Waiters()
    with waiters.waiting("a") as first, waiters.waiting("a") as second, waiters.waiting("b") as other:
        assert waiters.resolve(ok("a"))

        assert (await first.answer, await second.answer) == (ok("a"), ok("a"))
        assert not other.answer.done()


async def test_the_first_answer_wins_and_later_ones_find_nobody() -> None:
    waiters = Waiters()
    with waiters.waiting("a") as wait:
        assert waiters.resolve(ok("a"))
        assert not waiters.resolve(Result.failed("a", "internal", "late"))
        assert (await wait.answer).ok
    assert not waiters.resolve(ok("a"))


async def test_an_answer_without_id_speaks_of_its_whole_message() -> None:
    waiters = Waiters()
    broken = Result.failed("", "malformed", "unreadable")
    with waiters.waiting("a") as first, waiters.waiting("b") as second, waiters.waiting("c") as other:
        with waiters.correlated("bundle-1", [job("a"), job("b")]):
            assert waiters.resolve(broken, "bundle-1")

        assert (await first.answer, await second.answer) == (broken, broken)
        assert waiters.resolve(broken, "c")
        assert await other.answer == broken
        assert not waiters.resolve(broken, None)


async def test_a_message_sent_again_is_known_by_its_new_name_while_anybody_waits() -> None:
    waiters = Waiters()
    broken = Result.failed("", "malformed", "unreadable")
    with waiters.waiting("a") as first, waiters.waiting("b") as second:
        waiters.correlate("again", [job("a"), job("b")])
        waiters.correlate("more", [job("b")])
        assert waiters.resolve(broken, "again")
        assert (await first.answer, await second.answer) == (broken, broken)
    waiters.correlate("later", [job("c")])
    assert not waiters.resolve(broken, "again")


async def test_a_cancelled_wait_is_forgotten() -> None:
    waiters = Waiters()

    async def wait() -> Result:
        with waiters.waiting("a") as pending:
            return await pending.answer

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert len(waiters) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert len(waiters) == 0


async def test_a_job_can_be_under_way_once_only_but_be_looked_for_as_well() -> None:
    waiters = Waiters()
    with waiters.waiting("a", job=job("a")), waiters.waiting("a"), pytest.raises(InvalidJob, match="under way"):
        waiters.add("a", job=job("a"))
    assert len(waiters) == 0


async def test_only_sent_jobs_without_an_answer_are_sent_again() -> None:
    waiters = Waiters()
    with (
        waiters.waiting("a", job=job("a"), lane="bulk") as first,
        waiters.waiting("b", job=job("b"), lane="bulk"),
        waiters.waiting("c"),
    ):
        waiters.resolve(ok("b"))

        assert waiters.sent_jobs() == (first,)


async def test_everybody_hears_of_the_end() -> None:
    waiters = Waiters()
    with waiters.waiting("a") as first, waiters.waiting("b") as second:
        waiters.fail_all(ClientClosed("closed"))

        for wait in (first, second):
            with pytest.raises(ClientClosed):
                await wait.answer
