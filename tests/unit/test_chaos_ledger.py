"""The ledger of a chaos run: what is written is read back, a cut line is left out, and equal results look alike."""

from pathlib import Path

import numpy as np
from tests.chaos.ledger import History, Ledger, likeness
from tests.chaos.work import Kind, Work

from inferq_schemas import Result, Tensor

WORK = Work(5, rows=2)


def right(job_id: str) -> Result:
    return Result(v=1, id=job_id, status="ok", outputs={"y": Tensor.from_numpy(2 * WORK.x + 1)})


def test_what_is_written_is_read_back_by_job(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.sent("a", WORK, sender="raw", model="m", lane="bulk")
        ledger.sent("b", WORK, sender="service", model="m", lane="bulk")
        assert (ledger.waiting("m"), ledger.waiting("other"), ledger.waiting()) == (2, 0, 2)
        ledger.write("confirmed", "a")
        ledger.answered("reply", right("a"), WORK)
        ledger.answered("answer", Result.failed("b", "deadline_exceeded", "too late"), WORK)
        assert ledger.waiting() == 0
        ledger.write("fault", kind="worker_kill", target="worker-1", phase="begin")
        ledger.write("lost_data", since=1.5)
        ledger.answered("reply", right("nobody's"), None)

    history = History.read(tmp_path / "ledger")

    assert history.jobs["a"].confirmed_t is not None
    assert history.jobs["b"].confirmed_t is None
    assert [(entry["code"], entry["right"]) for entry in history.jobs["a"].replies] == [("ok", True)]
    assert [(entry["code"], entry["right"]) for entry in history.jobs["b"].answers] == [("deadline_exceeded", None)]
    assert [entry["kind"] for entry in history.faults] == ["worker_kill"]
    assert [since for since, _ in history.lost_data] == [1.5]
    assert [entry["id"] for entry in history.strangers] == ["nobody's"]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.sent("a", WORK, sender="raw", model="m", lane="bulk")
    with path.open("a") as cut:
        cut.write('{"t": 1, "e": "conf')

    assert History.read(path).jobs.keys() == {"a"}


def test_results_are_alike_only_if_everything_in_them_is() -> None:
    assert likeness(right("a")) == likeness(right("a"))
    assert likeness(right("a")) != likeness(right("b"))
    assert likeness(Result.failed("a", "internal", "x")) != likeness(Result.failed("a", "internal", "y"))


def test_only_the_exact_answer_to_a_job_is_right() -> None:
    y = 2 * WORK.x + 1

    assert WORK.is_right(y)
    assert not WORK.is_right(y[:1])
    assert not WORK.is_right(y.astype(np.float64))
    assert not WORK.is_right(Work(6, rows=2).x)
    assert not Work(5, rows=2, kind=Kind.FAIL).is_right(y)
