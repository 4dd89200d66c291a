"""Which redelivered jobs are suspect, from the records of runs that never ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq_worker.poison import RunRecord, Verdict, judge

ME = "me"


def record(worker: str, *ids: str, number: int = 1) -> RunRecord:
    return RunRecord(f"{worker}/{number}", worker, frozenset(ids), 1_800_000_000_000)


def verdict(*records: RunRecord, alive: tuple[str, ...] = (ME,)) -> Verdict:
    return judge("a", records, alive, ME)


def test_a_job_in_no_unfinished_run_is_clear() -> None:
    assert verdict() is Verdict.CLEAR
    assert verdict(record("dead", "b", "c")) is Verdict.CLEAR


@pytest.mark.parametrize("ids", [("a",), ("a", "b")])
@pytest.mark.parametrize("alive", [(ME,), (ME, "other")])
def test_one_unfinished_run_makes_a_suspect_that_runs_alone(ids: tuple[str, ...], alive: tuple[str, ...]) -> None:
    assert verdict(record("other", *ids), alive=alive) is Verdict.ALONE


def test_a_suspect_that_ran_alone_and_ended_its_worker_is_parked() -> None:
    assert verdict(record("first", "a", "b"), record("second", "a")) is Verdict.PARK
    assert verdict(record("first", "a"), record("second", "a")) is Verdict.PARK


def test_two_records_of_one_worker_are_one_death() -> None:
    assert verdict(record("dead", "a"), record("dead", "a", number=2)) is Verdict.ALONE


def test_a_suspect_that_runs_alone_in_a_worker_that_may_live_waits() -> None:
    assert verdict(record("first", "a", "b"), record("busy", "a"), alive=(ME, "busy")) is Verdict.WAIT


def test_a_job_that_was_in_company_whenever_a_worker_ended_gets_a_run_of_its_own() -> None:
    assert verdict(record("first", "a", "b"), record("second", "a", "c")) is Verdict.ALONE


def test_a_dead_solo_run_outweighs_everything_else() -> None:
    records = (record("busy", "a"), record("dead", "a"), record("old", "a", "b"))
    assert verdict(*records, alive=(ME, "busy")) is Verdict.PARK


def test_own_records_are_no_suspicion() -> None:
    assert verdict(record(ME, "a")) is Verdict.CLEAR
    assert verdict(record(ME, "a"), alive=()) is Verdict.CLEAR
    assert verdict(record(ME, "a"), record("dead", "a", "b")) is Verdict.ALONE
    assert verdict(record(ME, "a"), record(ME, "a", "b", number=2), alive=()) is Verdict.CLEAR


@given(st.text(max_size=20), st.frozensets(st.text(max_size=20)), st.integers(0, 2**50))
def test_a_record_survives_the_store(worker: str, ids: frozenset[str], started_unix_ms: int) -> None:
    made = RunRecord(f"{worker}/1", worker, ids, started_unix_ms)
    assert RunRecord.decode(made.key, made.encode()) == made


@pytest.mark.parametrize("ids", [("b", "a"), ("a", "b")])
def test_a_record_is_the_same_bytes_whatever_the_order_of_its_jobs(ids: tuple[str, ...]) -> None:
    assert record("w", *ids).encode() == record("w", "a", "b").encode()
