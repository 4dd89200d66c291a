"""The producer script against a real worker: files in, answers out, and an exit status that can be trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.worker_process import Site, Workers


def jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
async def worker(site: Site, workers: Workers, tmp_path: Path) -> None:
    await workers.ready("--model", models.scale(tmp_path, features=3), "--model", models.gather(tmp_path))


async def test_json_lines_are_answered_line_by_line(site: Site, worker: None, tmp_path: Path) -> None:
    records = [{"inputs": {"x": [[n, n + 0.5, 0]]}, "id": f"line-{n}"} for n in range(300)]
    source = jsonl(tmp_path / "in.jsonl", list(records))

    done = await site.inferq("submit", "--model", "scale", str(source), "--output", "out.jsonl")

    assert done.returncode == 0, done.stderr
    answers = {line["index"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert sorted(answers) == list(range(300))
    for n, answer in answers.items():
        assert answer["id"] == f"line-{n}"
        assert answer["outputs"]["y"] == [[2 * n + 1, 2 * n + 2, 1]]
    assert "300 ok" in done.stderr


async def test_the_rows_of_an_npz_come_back_in_order(site: Site, worker: None, tmp_path: Path) -> None:
    x = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    np.savez(tmp_path / "in.npz", x=x)

    done = await site.inferq("submit", "--model", "scale", "in.npz", "--rows-per-job", "7", "--output", "out.npz")

    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as answers:
        np.testing.assert_array_equal(answers["y"], 2 * x + 1)
        np.testing.assert_array_equal(answers["job_index"], np.arange(1000) // 7)


async def test_one_failed_job_makes_the_exit_status_1_and_the_others_are_answered(
    site: Site, worker: None, tmp_path: Path
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"i": [[n]]} for n in (0, 1, 99, 3)])

    done = await site.inferq("submit", "--model", "gather", str(source))

    assert done.returncode == 1
    answers = {line["index"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert answers[2]["error"]["code"] == "inference_failed"
    assert [answers[n]["outputs"]["y"] for n in (0, 1, 3)] == [[[[n, 10 * n]]] for n in (0, 1, 3)]
    assert "inference_failed 1" in done.stderr


async def test_a_model_that_no_queue_is_for_is_said_and_the_exit_status_is_2(
    site: Site, worker: None, tmp_path: Path
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"x": [[1, 2, 3]]}])

    done = await site.inferq("submit", "--model", "nobody", str(source))

    assert done.returncode == 2
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr


async def test_result_finds_an_answer_by_its_id_afterwards(site: Site, worker: None, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"inputs": {"x": [[1.0, 2.0, 3.0]]}, "id": "kept"}])
    assert (await site.inferq("submit", "--model", "scale", str(source))).returncode == 0

    found = await site.inferq("result", "kept", "--json")
    unknown = await site.inferq("result", "never-sent")

    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["outputs"]["y"] == [[3, 5, 7]]
    assert unknown.returncode == 3
    assert "never-sent" in unknown.stderr
