"""Lengths of time as people type and read them."""

import argparse

import pytest

from inferq.commands.durations import length_of_time, short_time


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("1d", 86_400)])
def test_a_length_of_time_has_a_unit_or_is_seconds(text: str, seconds: float) -> None:
    assert length_of_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1w", "m", "1 m", "nan", "inf", "1e9", "99999d"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no length of time"):
        length_of_time(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (90_000, "1d"), (10**7, "115d")]
)
def test_a_length_of_time_is_shown_in_one_unit(seconds: float, text: str) -> None:
    assert short_time(seconds) == text
