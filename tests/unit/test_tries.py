"""When a message on its way out goes without what its sender chose, and when it goes back."""

from __future__ import annotations

import pytest

from inferq.amqp import PublishForbidden, PublishUnknown, Refused, Unencodable
from inferq_worker.tries import Tries


def test_a_closed_channel_takes_the_extras_first_and_the_hope_later() -> None:
    tries = Tries()
    seen = []
    for _ in range(10):
        seen.append((tries.bare, tries.hopeless))
        tries.failed(PublishForbidden("406"))
    assert seen == [(False, False)] * 3 + [(True, False)] * 7
    assert tries.hopeless


@pytest.mark.parametrize("error", [PublishUnknown("no confirm"), Refused("full")])
def test_a_broker_that_is_away_or_full_is_waited_for(error: PublishUnknown | Refused) -> None:
    tries = Tries()
    for _ in range(100):
        tries.failed(error)
    assert not tries.bare


def test_what_cannot_be_written_is_hopeless_at_once() -> None:
    tries = Tries()
    tries.failed(Unencodable("bytes"))
    assert tries.hopeless
