import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferq.npz import FAILED_NAMES, INDEX_NAME, NpzWriter, npz_records, npz_rows
from inferq.records import InputError, Reading
from inferq_schemas import Tensor

PLAIN = Reading({})


def test_rows_are_cut_into_jobs_and_the_last_may_be_shorter(tmp_path: Path) -> None:
    x, t = np.arange(14, dtype=np.float64).reshape(7, 2), np.array([f"é{n}" for n in range(7)])
    path = tmp_path / "a.npz"
    np.savez(path, x=x, t=t)

    records = list(npz_records(path, 3, PLAIN))

    assert npz_rows(path) == 7
    assert [np.asarray(record.inputs["x"]).shape for record in records] == [(3, 2), (3, 2), (1, 2)]
    np.testing.assert_array_equal(np.concatenate([np.asarray(record.inputs["x"]) for record in records]), x)
    np.testing.assert_array_equal(np.concatenate([np.asarray(record.inputs["t"]) for record in records]), t)


def test_compressed_archives_and_dtypes_work(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.ones((2, 2)), b=np.ones((2, 1)))

    (record, _) = npz_records(path, 1, Reading({"x": "float32", "b": "bfloat16"}))

    assert np.asarray(record.inputs["x"]).dtype == np.float32
    assert isinstance(record.inputs["b"], Tensor)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": np.ones(3), "y": np.ones(2)}, "same number of rows"),
        ({"x": np.float32(1)}, "has no rows"),
        ({"x": np.array([object()], dtype=object)}, "pickled"),
        ({"x": np.asfortranarray(np.ones((2, 2)))}, "ascontiguousarray"),
        ({}, "same number of rows"),
    ],
)
def test_an_archive_that_is_no_input_is_refused_by_name(tmp_path: Path, arrays: Any, problem: str) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)

    with pytest.raises(InputError, match=rf"odd\.npz.*{problem}"):
        npz_rows(path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)

    with pytest.raises(InputError, match="write it with numpy"):
        npz_rows(path)


def test_answers_are_written_in_the_order_of_their_jobs(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with NpzWriter(path) as writer:
        for index in (2, 0, 3):
            writer.add(index, {"y": np.full((index + 1, 2), index, np.float32), "n": np.full(index + 1, index)})

    written = np.load(path)
    assert written[INDEX_NAME].tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
    assert written["n"].tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
    np.testing.assert_array_equal(written["y"][:, 1], written["n"])
    assert list(tmp_path.iterdir()) == [path]


def test_outputs_that_do_not_fit_together_are_refused_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with NpzWriter(path) as writer:
        writer.add(0, {"y": np.ones((1, 2))})
        with pytest.raises(InputError, match=r"job 1: .*write \.jsonl"):
            writer.add(1, {"y": np.ones((1, 3))})

    assert np.load(path)["y"].shape == (1, 2)


def test_texts_are_for_json(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with pytest.raises(InputError, match=r"write \.jsonl"), NpzWriter(path) as writer:
        writer.add(0, {"y": np.array(["a"], dtype=object)})

    assert list(tmp_path.iterdir()) == []


def test_failures_stand_beside_the_answers_with_index_id_code_and_message(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with NpzWriter(path) as writer:
        writer.fail(4, "d", "invalid_input", "é" * 1000)
        writer.add(0, {"y": np.ones((1, 2))})
        writer.fail(2, "b", "overloaded", "full")

    written = np.load(path, allow_pickle=False)
    assert written["failed_index"].tolist() == [2, 4]
    assert written["failed_id"].tolist() == ["b", "d"]
    assert written["failed_code"].tolist() == ["overloaded", "invalid_input"]
    assert written["failed_message"].tolist() == ["full", "é" * 300]
    assert written[INDEX_NAME].tolist() == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_an_archive_of_failures_alone_is_worth_having(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with contextlib.suppress(KeyboardInterrupt), NpzWriter(path) as writer:
        writer.fail(0, "a", "internal", "why")
        raise KeyboardInterrupt

    assert np.load(path)["failed_message"].tolist() == ["why"]


def test_a_run_without_failures_has_no_arrays_of_them(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with NpzWriter(path) as writer:
        writer.add(0, {"y": np.ones((1, 2))})

    assert not set(FAILED_NAMES) & set(np.load(path))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No such file"):
        NpzWriter(tmp_path / "nowhere" / "out.npz")
