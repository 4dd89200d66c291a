"""The checker of chaos runs, on ledgers made by hand: what it calls lost, wrong, conflicting, and what it excuses."""

from typing import Any

import pytest
from tests.chaos.checker import Evidence, Parked, Verdict, check
from tests.chaos.ledger import History

ID = "job"
SENT = {"t": 10.0, "e": "sent", "id": ID, "sender": "raw", "n": 1, "rows": 1, "kind": "right"}
CONFIRMED = {"t": 11.0, "e": "confirmed", "id": ID}


def reply(t: float = 12.0, *, likeness: str = "a", right: bool | None = True, code: str = "ok") -> dict[str, Any]:
    return {"t": t, "e": "reply", "id": ID, "code": code, "right": right, "likeness": likeness}


def judged(*entries: dict[str, Any], **found: Any) -> Verdict:
    history = History()
    for entry in entries:
        history.take(entry)
    nothing: dict[str, Any] = {
        "outcomes": {},
        "parked": [],
        "waiting": frozenset(),
        "unsettled": {},
        "unstored": frozenset(),
        "crashes": {},
    }
    return check(history, Evidence(**{**nothing, **found}))


def test_a_job_that_was_answered_right_is_fine() -> None:
    verdict = judged(SENT, CONFIRMED, reply(), reply(13.0))

    assert not verdict.failed
    assert (verdict.published, verdict.confirmed, verdict.ok) == (1, 1, 1)


def test_a_failure_is_an_answer_and_counts_by_its_code() -> None:
    verdict = judged(SENT, CONFIRMED, reply(right=None, code="deadline_exceeded"))

    assert not verdict.failed
    assert verdict.errors == {"deadline_exceeded": 1}


def test_a_confirmed_job_of_which_nothing_is_left_is_lost() -> None:
    assert judged(SENT, CONFIRMED).lost == 1
    assert judged(SENT, CONFIRMED).failed


def test_a_job_that_was_never_confirmed_is_nobodys_promise() -> None:
    assert not judged(SENT).failed


def test_a_confirmed_job_that_is_still_in_a_queue_is_stuck_and_not_lost() -> None:
    verdict = judged(SENT, CONFIRMED, waiting=frozenset({ID}), unsettled={"inferq.chaos.bulk": 1})

    assert (verdict.stuck, verdict.lost, verdict.unsettled) == (1, 0, 1)


def test_a_parked_job_is_not_lost_and_must_say_why() -> None:
    told = Parked((ID,), "inference_failed", "the model failed")
    mute = Parked((ID,), "", "")
    unreadable = Parked((), "malformed", "not msgpack")

    assert judged(SENT, CONFIRMED, parked=[told]).lost == 0
    assert judged(SENT, CONFIRMED, parked=[told]).unexplained == 0
    assert judged(SENT, CONFIRMED, parked=[mute]).unexplained == 1
    assert judged(SENT, CONFIRMED, parked=[unreadable]).unexplained == 1


def test_an_outcome_without_a_reply_in_a_durable_queue_is_a_lost_reply() -> None:
    verdict = judged(SENT, CONFIRMED, outcomes={ID: reply() | {"e": "outcome"}})

    assert (verdict.lost, verdict.unreplied) == (0, 1)


def test_an_answer_that_is_not_right_is_wrong_wherever_it_is_found() -> None:
    assert judged(SENT, CONFIRMED, reply(right=False)).wrong == 1
    assert judged(SENT, CONFIRMED, reply(), outcomes={ID: reply(right=False)}).wrong == 1


def test_two_answers_that_differ_are_a_conflict_even_if_both_are_right() -> None:
    assert judged(SENT, CONFIRMED, reply(), reply(13.0, likeness="b")).conflicting == 1
    assert judged(SENT, CONFIRMED, reply(), outcomes={ID: reply(20.0, likeness="b")}).conflicting == 1


@pytest.mark.parametrize(
    ("since", "until", "excused"), [(5, 9, False), (9, 12, True), (12.5, 12.6, True), (14, 15, False)]
)
def test_two_answers_may_differ_only_if_redis_lost_its_data_between_them(
    since: float, until: float, excused: bool
) -> None:
    lost = {"t": until, "e": "lost_data", "since": since}

    verdict = judged(SENT, CONFIRMED, reply(12.0), reply(13.0, likeness="b"), lost)

    assert (verdict.excused, verdict.conflicting) == (int(excused), int(not excused))


def test_two_answers_may_differ_if_a_worker_said_that_it_answered_unstored() -> None:
    verdict = judged(SENT, CONFIRMED, reply(), reply(13.0, likeness="b"), unstored=frozenset({ID}))

    assert (verdict.excused, verdict.conflicting, verdict.unstored) == (1, 0, 1)


def test_an_answer_that_lay_only_in_a_redis_that_lost_its_data_is_forgotten() -> None:
    lost = {"t": 20.0, "e": "lost_data", "since": 19.0}

    verdict = judged(SENT | {"sender": "poller"}, CONFIRMED, lost)

    assert (verdict.forgotten, verdict.lost) == (1, 0)
    assert not verdict.failed


def test_a_caller_that_the_client_library_left_waiting_is_a_failure() -> None:
    verdict = judged(SENT | {"sender": "pipeline"}, {"t": 99.0, "e": "unended", "id": ID})

    assert verdict.unended == 1
    assert verdict.failed


def test_ends_that_nobody_asked_for_and_replies_to_nobody_fail_the_run() -> None:
    assert judged(crashes={"1 by itself": 2}).crashes == 2
    assert judged(reply()).strangers == 1
