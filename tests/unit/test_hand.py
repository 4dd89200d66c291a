"""The jobs in hand, of which a large one has several steps at work at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.fakes import item_of, job_of, metrics_of

from inferq_worker.hand import Hand
from inferq_worker.scheduling import SizeOrTimeout

if TYPE_CHECKING:
    from inferq_worker.work import WorkItem


class Desk:
    """A large job whose first step has left; the second waits."""

    def __init__(self) -> None:
        self.policy: SizeOrTimeout[WorkItem] = SizeOrTimeout(
            max_rows=2, max_bytes=2**20, max_wait_s=0.0, predict_s=lambda _bucket, _rows: None
        )
        nobody = cast("Any", None)
        self.hand = Hand(policy=self.policy, outbox=nobody, triage=nobody, metrics=metrics_of())
        self.first = item_of(job_of("a", 1, 2, 3, 4, 5), step_rows=2)
        self.hand.take(self.first)
        rest = self.first.rest()
        assert rest is not None
        self.second = rest
        self.policy.add(self.second)


@pytest.mark.parametrize("step", ["first", "second"])
def test_a_job_that_leaves_leaves_with_all_its_steps(step: str) -> None:
    desk = Desk()
    assert desk.first in desk.hand
    assert desk.second in desk.hand
    desk.hand.leave(getattr(desk, step))
    assert (len(desk.hand), len(desk.policy)) == (0, 0)
    assert desk.first not in desk.hand
    assert desk.second not in desk.hand


def test_a_job_of_the_same_id_that_came_afterwards_is_another_one() -> None:
    desk = Desk()
    desk.hand.leave(desk.first)
    desk.hand.take(again := item_of(job_of("a", 1)))
    assert again in desk.hand
    assert desk.second not in desk.hand
    desk.hand.leave(desk.second)
    assert again in desk.hand
