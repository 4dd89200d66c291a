from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.checkpoint import Answered, Checkpoint
from inferq.records import InputError

JOB = {"files": [["a.jsonl", 12]], "model": "m"}


@given(st.permutations(range(40)), st.integers(0, 40))
def test_answered_numbers_are_a_set_that_closes_its_gaps(order: list[int], taken: int) -> None:
    answered = Answered()
    for number in order[:taken]:
        answered.add(number)
        answered.add(number)

    assert {number for number in range(45) if number in answered} == set(order[:taken])
    assert len(answered) == taken
    if taken == 40:
        assert not answered.above


def test_a_later_run_knows_what_is_answered_and_gives_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with Checkpoint(path, JOB) as first:
        first.add(0)
        first.add(2)
        first.commit(100)
        first.add(3)
        first.commit(150)
        job_id = first.job_id("a.jsonl", 1)

    with Checkpoint(path, JOB) as again:
        assert [number in again.answered for number in range(5)] == [True, False, True, True, False]
        assert again.output_bytes == 150
        assert again.job_id("a.jsonl", 1) == job_id
        assert again.job_id("b.jsonl", 1) != job_id


def test_what_was_not_committed_is_not_answered(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with Checkpoint(path, JOB) as first:
        first.add(7)

    with Checkpoint(path, JOB) as again:
        assert 7 not in again.answered


def test_a_line_that_a_crash_cut_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with Checkpoint(path, JOB) as first:
        first.add(0)
        first.commit(10)
    with path.open("ab") as file:
        file.write(b'{"done":[1,')

    with Checkpoint(path, JOB) as again:
        assert 1 not in again.answered
        again.add(1)
        again.commit(20)

    with Checkpoint(path, JOB) as third:
        assert (len(third.answered), third.output_bytes) == (2, 20)


def test_a_commit_is_due_every_few_hundred_answers(tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "run.ckpt", JOB) as checkpoint:
        due = [checkpoint.add(number) for number in range(256)]

    assert due.index(True) == 255


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with Checkpoint(path, JOB):
        pass

    with pytest.raises(InputError, match=r"another run \(model: 'm' there, 'other' now\)"):
        Checkpoint(path, JOB | {"model": "other"})


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b"[]\n", b'{"format": "other"}\n'])
def test_what_is_no_checkpoint_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious.txt"
    path.write_bytes(content)

    with pytest.raises(InputError, match="no checkpoint"):
        Checkpoint(path, JOB)

    assert path.read_bytes() == content
