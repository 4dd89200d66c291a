"""What of a sender's headers travels on: only what AMQP can write again, and only so much."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, cast

import pytest
from pamqp import encode

from inferq.headers import kept, next_attempt, short, trace

if TYPE_CHECKING:
    from pamqp.common import FieldTable

ODD = [
    b"\xff\xfe",
    bytearray(b"x"),
    1e300,
    float("nan"),
    float("inf"),
    2**63,
    None,
    dt.datetime.now(dt.UTC),
    [1],
    {"a": 1},
]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_value_that_could_not_be_written_again_stays_behind_and_is_counted(value: object) -> None:
    assert kept({"mine": value, "other": "x"}) == ({"other": "x"}, 1)
    assert trace({"traceparent": value}) == {}


@pytest.mark.parametrize("value", ["text", "\ufffd", True, 0, -(2**63), 2**63 - 1, 1.5, -3.4e38])
def test_plain_values_travel_on_and_can_be_written(value: object) -> None:
    found, left_out = kept({"mine": value})
    assert (found, left_out) == ({"mine": value}, 0)
    assert encode.field_table(cast("FieldTable", found))


def test_the_headers_of_the_broker_stay_behind_uncounted() -> None:
    assert kept({"x-death": [], "X-Delivery-Count": 3}) == ({}, 0)


def test_a_table_stays_small_and_keeps_our_headers_first() -> None:
    found, left_out = kept(
        {"a": "x" * 20_000, **{f"h{number}": "x" * 1_000 for number in range(99)}, "inferq-accept": "bundle"}
    )
    assert found["inferq-accept"] == "bundle"
    assert len(encode.field_table(cast("FieldTable", found))) <= 16 * 1024 + 4
    assert len(found) + left_out == 101


def test_a_table_has_few_fields() -> None:
    found, left_out = kept({f"h{number}": number for number in range(200)})
    assert (len(found), left_out) == (64, 136)


def test_a_name_that_pamqp_would_cut_stays_behind() -> None:
    assert kept({"n" * 129: 1}) == ({}, 1)


def test_a_long_trace_stays_behind() -> None:
    assert trace({"traceparent": "t", "tracestate": "s" * 513}) == {"traceparent": "t"}


@pytest.mark.parametrize(("before", "after"), [(None, 2), (1, 2), (4, 5), (-7, 2), (2**63 - 1, 1_000_001), ("x", 2)])
def test_attempts_are_counted_within_bounds(before: object, after: int) -> None:
    assert next_attempt({"inferq-attempt": before}) == after


def test_text_that_marks_made_too_long_is_no_short_string() -> None:
    assert short("\ufffd" * 85) == "\ufffd" * 85
    assert short("\ufffd" * 86) is None
    assert short(None) is None
