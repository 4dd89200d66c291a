import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from inferq.answers import Answer, failed_answer
from inferq.checkpoint import Checkpoint
from inferq.errors import AnswerTimeout, JobFailed
from inferq.jobs import Item
from inferq.progress import Progress
from inferq.records import InputError, Reading
from inferq.submission import Sources, Submission, open_output
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


async def run(folder: Path, answers: Sequence[Answer]) -> list[Item]:
    """One run over five records; takes these answers and ends. Returns what was sent."""
    sources = Sources([write(folder / "in.jsonl", 5)], Reading({}), 1)
    with (
        checkpoint(folder) as remembered,
        open_output(folder / "out.jsonl", remembered) as output,
        Submission(sources, output, Progress(None), remembered) as submission,
    ):
        sent = list(submission.items())
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
