import io
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from inferq.answers import Answer, failed_answer
from inferq.checkpoint import Checkpoint
from inferq.errors import AnswerTimeout, InvalidJob, JobFailed, JobTooLarge
from inferq.jobs import Item
from inferq.outputs import open_output
from inferq.progress import Progress
from inferq.records import InputError, Reading
from inferq.sources import Sources
from inferq.submission import Submission, failure_line
from inferq_schemas import Result, Tensor


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"x": [[n]]}) + "\n" for n in range(count)))
    return path


def answer(index: int) -> Answer:
    y = np.array([[index]])
    return Answer(f"j{index}", {"y": y}, Result(f"j{index}", "ok", outputs={"y": Tensor.from_numpy(y)}), index)


def timed_out(index: int) -> Answer:
    return failed_answer(f"j{index}", AnswerTimeout("no answer"), index)


async def stream(answers: Sequence[Answer]) -> AsyncIterator[Answer]:
    for found in answers:
        yield found


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder / "run.ckpt", {"model": "m"})


def items_of(submission: Submission) -> list[Item]:
    found = submission.items()
    assert isinstance(found, Iterator)
    return list(found)


async def run(folder: Path, answers: Sequence[Answer]) -> list[Item]:
    """One run over five records; takes these answers and ends. Returns what was sent."""
    sources = Sources([write(folder / "in.jsonl", 5)], Reading({}), 1)
    with (
        checkpoint(folder) as remembered,
        open_output(folder / "out.jsonl", remembered) as output,
        Submission(sources, output, Progress(None), remembered) as submission,
    ):
        sent = items_of(submission)
        await submission.take(stream(answers))
    return sent


def lines(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


async def test_a_second_run_sends_only_what_has_no_answer_under_the_same_ids(tmp_path: Path) -> None:
    first = await run(tmp_path, [answer(3), answer(0)])
    second = await run(tmp_path, [answer(0), answer(1), answer(2)])

    assert [item.id for item in second] == [first[number].id for number in (1, 2, 4)]
    assert lines(tmp_path / "out.jsonl") == [3, 0, 1, 2, 4]
    assert await run(tmp_path, []) == []


async def test_output_beyond_the_checkpoint_is_cut_off_because_it_comes_again(tmp_path: Path) -> None:
    await run(tmp_path, [answer(0)])
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"index": 1}\n{"ind')

    await run(tmp_path, [answer(0)])

    assert lines(tmp_path / "out.jsonl") == [0, 1]


async def test_output_that_was_lost_is_noticed(tmp_path: Path) -> None:
    await run(tmp_path, [answer(0)])
    (tmp_path / "out.jsonl").unlink()

    with pytest.raises(InputError, match="delete the checkpoint"):
        await run(tmp_path, [])


async def test_a_job_without_answer_is_tried_again_and_a_failed_one_is_not(tmp_path: Path) -> None:
    failed = failed_answer("j1", JobFailed("invalid_input", "bad", Result.failed("j1", "invalid_input", "bad")), 1)
    await run(tmp_path, [timed_out(0), failed])

    assert len(await run(tmp_path, [])) == 4
    assert lines(tmp_path / "out.jsonl") == [1]


async def test_the_share_of_what_was_read_counts_bytes_and_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((10, 2)))
    sources = Sources([tmp_path / "a.npz", write(tmp_path / "in.jsonl", 4)], Reading({}), 4)

    records = list(sources.records())

    assert [record.number for record in records] == list(range(7))
    assert [record.number_in_file for record in records] == [0, 1, 2, 0, 1, 2, 3]
    share = sources.share()
    assert share is not None
    assert share == pytest.approx(1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl: No such file"):
        Sources([tmp_path / "nothing.jsonl"], Reading({}), 1)


async def submitted(path: Path, output: Path, *, strict: bool = False) -> tuple[Submission, list[Item], str]:
    """Read everything and answer every item; returns the notes as well."""
    notes = io.StringIO()
    sources = Sources([path], Reading({}), 1, strict=strict)
    with (
        open_output(output, None) as target,
        Submission(sources, target, Progress(None, notes=notes), None) as submission,
    ):
        sent = items_of(submission)
        await submission.take(stream([answer(index) for index in range(len(sent))]))
    return submission, sent, notes.getvalue()


async def test_a_bad_line_costs_only_itself(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"x": [[1]]}\n{"x": [[1], [1, 2]]}\n\n{"x": [[3]]}\n')

    submission, sent, notes = await submitted(source, target)

    written = {line["index"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert len(sent) == 2
    assert [written[index]["status"] for index in range(3)] == ["ok", "error", "ok"]
    assert written[1]["error"]["code"] == "invalid_input"
    assert (submission.tally.ok, submission.tally.codes) == (2, {"invalid_input": 1})
    assert notes.startswith(f"inferq: {source}, line 2: invalid_input: input 'x': rows of different length")
    assert notes.count("\n") == 1


async def test_reading_strictly_ends_at_the_first_bad_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"x": [[1]]}\nnonsense\n{"x": [[3]]}\n')

    with pytest.raises(InputError, match=r"in\.jsonl, line 2: not JSON"):
        await submitted(source, tmp_path / "out.jsonl", strict=True)


async def test_a_bad_line_is_not_told_again_as_new_by_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("nonsense\n")
    sources = Sources([tmp_path / "in.jsonl"], Reading({}), 1)
    for _ in range(2):
        with (
            checkpoint(tmp_path) as remembered,
            open_output(tmp_path / "out.jsonl", remembered) as output,
            Submission(sources, output, Progress(None), remembered) as submission,
        ):
            assert items_of(submission) == []

    assert lines(tmp_path / "out.jsonl") == [0]


async def test_the_first_failures_of_each_kind_are_shown(tmp_path: Path) -> None:
    notes = io.StringIO()
    sources = Sources([write(tmp_path / "in.jsonl", 5)], Reading({}), 1)
    errors = [
        AnswerTimeout("no answer to job 1 within 2 s"),
        AnswerTimeout("no answer to job 77 within 2 s"),
        InvalidJob("one"),
        JobTooLarge("two"),
        InvalidJob("three"),
    ]
    with open_output(tmp_path / "out.npz", None) as output:
        submission = Submission(sources, output, Progress(None, notes=notes), None)
        items_of(submission)
        await submission.take(stream([failed_answer(f"j{n}", error, n) for n, error in enumerate(errors)]))

    shown = [line.partition(", ")[2] for line in notes.getvalue().splitlines()]
    assert shown == [
        "line 1: deadline_exceeded: no answer to job 1 within 2 s",
        "line 3: invalid_input: one",
        "line 4: too_large: two",
    ]
    assert np.load(tmp_path / "out.npz")["failed_message"].tolist() == [str(error) for error in errors]


def test_a_refused_dtype_comes_with_the_option_that_mends_it() -> None:
    message = "inputs.x.dtype is int64, the model takes float32"
    error = JobFailed("invalid_input", message, Result.failed("j", "invalid_input", message))

    assert failure_line("in.jsonl, line 1", error) == (
        f"in.jsonl, line 1: invalid_input: {message}; say it with --dtype x=float32"
    )


def test_a_dtype_for_an_input_that_no_record_has_is_noticed_at_the_end(tmp_path: Path) -> None:
    sources = Sources([write(tmp_path / "in.jsonl", 1)], Reading({"x": "float32", "z": "float32"}), 1)
    assert sources.unused_dtypes() == {}

    list(sources.records())

    assert sources.unused_dtypes() == {"z": "float32"}
    assert sources.input_names == ["x"]
