"""Pauses as they are stored, and which lanes they hold for."""

from __future__ import annotations

from typing import cast

import pytest

from inferq.pauses import Pause, decode_pauses, in_force

PAUSE = Pause("m.bulk", "ann@host", "backlog", 1000, 5000)


def test_a_pause_is_read_as_it_was_written() -> None:
    assert Pause.decode("m.bulk", PAUSE.encode()) == PAUSE
    assert Pause.decode("m", Pause("m", "a", "", 1).encode()).until_unix_ms is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x80",
        b"\x84\xa2by\xa1a\xa3why\xa0\xa5since\xa1x\xa5until\xc0",
        Pause("m", "a", "", cast("int", float("inf"))).encode(),
    ],
)
def test_a_pause_that_cannot_be_read_holds(raw: bytes) -> None:
    pause = Pause.decode("m", raw)
    assert pause.holds(10**15)
    assert "cannot be read" in pause.why


def test_a_pause_ends_by_its_own_time() -> None:
    assert PAUSE.holds(4999)
    assert not PAUSE.holds(5000)


def test_a_model_is_paused_with_all_its_lanes_and_a_lane_alone() -> None:
    whole = Pause("m", "a", "", 0)
    lane = Pause("m.bulk", "b", "", 0)
    assert in_force({"m": whole, "m.bulk": lane}, "m", "bulk", 1) is whole
    assert in_force({"m.bulk": lane}, "m", "bulk", 1) is lane
    assert in_force({"m.bulk": lane}, "m", "interactive", 1) is None
    assert in_force({"m": whole}, "m", "fallback", 1) is whole
    assert in_force({"m": whole}, "m2", "bulk", 1) is None
    assert in_force({"m": PAUSE, "m.bulk": lane}, "m", "bulk", 6000) is lane, "the model's has ended"


def test_stored_pauses_are_known_by_what_they_are_for() -> None:
    assert decode_pauses({b"m.bulk": PAUSE.encode(), b"\xff": b""}).keys() == {"m.bulk", "\ufffd"}
