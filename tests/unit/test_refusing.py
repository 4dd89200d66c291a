"""A reply queue that refuses is spared, and tried again now and then."""

from __future__ import annotations

from inferq_worker.refusing import RefusingQueues


def refusing(queue: str = "q") -> RefusingQueues:
    """A queue that has refused from 0 to 2 s."""
    queues = RefusingQueues()
    assert not queues.refused(queue, 0.0)
    assert queues.refused(queue, 2.0)
    return queues


def test_a_queue_that_refuses_for_a_moment_is_tried_on() -> None:
    queues = RefusingQueues()
    assert not queues.refused("q", 0.0)
    assert not queues.refused("q", 1.9)
    assert not queues.closed("q", 1.9)


def test_a_queue_that_has_refused_for_two_seconds_is_closed_and_no_other() -> None:
    queues = refusing()
    assert queues.closed("q", 2.1)
    assert not queues.closed("other", 2.1)


def test_one_caller_in_ten_seconds_probes_it() -> None:
    queues = refusing()
    assert [queues.closed("q", 12.5) for _ in range(3)] == [False, True, True]
    assert queues.refused("q", 12.6)
    assert [queues.closed("q", 22.6) for _ in range(2)] == [False, True]


def test_a_queue_that_takes_a_reply_is_open_again() -> None:
    queues = refusing()
    queues.took("q")
    assert not queues.closed("q", 2.1)
    assert not queues.refused("q", 2.2)


def test_a_refusal_of_long_ago_counts_no_more() -> None:
    queues = RefusingQueues()
    queues.refused("q", 0.0)
    assert not queues.refused("q", 3_600.0)


def test_only_so_many_queues_are_remembered() -> None:
    queues = refusing("first")
    for number in range(1_000):
        queues.refused(str(number), 3.0)
    assert not queues.closed("first", 4.0)
    assert not queues.refused("first", 4.0)
