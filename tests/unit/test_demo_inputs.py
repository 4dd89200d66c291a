"""What the demo's model is fed, on files of every awkward length, and how its scores are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from infra.demo.inputs import Labels, UnknownModelError, features, too_short

PADDING = 256
CONFIG = {
    "beg_size": 1024,
    "mid_size": 0,
    "end_size": 1024,
    "block_size": 4096,
    "padding_token": PADDING,
    "min_file_size_for_dl": 8,
    "use_inputs_at_offsets": False,
    "medium_confidence_threshold": 0.5,
    "target_labels_space": ["gzip", "python", "rst"],
    "thresholds": {"rst": 0.9},
}


def halves(content: bytes) -> tuple[list[int], list[int]]:
    row = features(content)
    assert row.shape == (1, 2048)
    assert row.dtype == np.int32
    return row[0, :1024].tolist(), row[0, 1024:].tolist()


@pytest.mark.parametrize("content", [b"", b" ", b"\n\t\r\v\f " * 2000])
def test_a_file_without_anything_in_it_is_all_padding(content: bytes) -> None:
    assert halves(content) == ([PADDING] * 1024, [PADDING] * 1024)


def test_a_short_file_is_filled_up_behind_and_before() -> None:
    begin, end = halves(b"abc")
    assert begin == [97, 98, 99] + [PADDING] * 1021
    assert end == [PADDING] * 1021 + [97, 98, 99]


def test_white_space_goes_from_the_outer_side_of_each_half_only() -> None:
    begin, end = halves(b" \n a b\t\n")
    assert begin == [97, 32, 98, 9, 10] + [PADDING] * 1019
    assert end == [PADDING] * 1018 + [32, 10, 32, 97, 32, 98]


@pytest.mark.parametrize("size", [1023, 1024, 1025, 2047, 2048, 4095, 4096, 4097, 10_000])
def test_each_half_is_the_outermost_kilobyte(size: int) -> None:
    content = bytes(33 + number % 223 for number in range(size))  # no white space
    begin, end = halves(content)
    known = min(size, 1024)
    assert begin == list(content[:known]) + [PADDING] * (1024 - known)
    assert end == [PADDING] * (1024 - known) + list(content[-known:])


def test_white_space_beyond_the_block_is_not_looked_through() -> None:
    begin, end = halves(b" " * 4096 + b"x" * 100 + b"\n" * 4096)
    assert begin == [PADDING] * 1024
    assert end == [PADDING] * 1024


def test_a_block_that_is_mostly_white_space_gives_what_is_left_of_it() -> None:
    begin, end = halves(b" " * 4000 + b"x" * 500 + b" " * 4000)
    assert begin == [120] * 96 + [PADDING] * 928
    assert end == [PADDING] * 928 + [120] * 96


def test_every_byte_keeps_its_value_and_none_looks_like_padding() -> None:
    begin, _ = halves(bytes([1, *range(256)]))
    assert begin[:257] == [1, *range(256)]


@pytest.mark.parametrize(("content", "short"), [(b"1234567", True), (b"12345678", False), (b" \n" * 9 + b"abc", True)])
def test_files_that_the_model_is_never_asked_about_are_known(content: bytes, *, short: bool) -> None:
    assert too_short(content) is short


def test_a_label_is_sure_from_its_own_threshold_on(tmp_path: Path) -> None:
    path = tmp_path / "config.min.json"
    path.write_text(json.dumps(CONFIG))
    labels = Labels.read(path)

    python = labels.verdict(np.array([0.1, 0.6, 0.3], np.float32))
    rst = labels.verdict(np.array([0.1, 0.1, 0.8], np.float32))

    assert (python.label, python.sure) == ("python", True)
    assert (rst.label, rst.sure) == ("rst", False)
    assert rst.score == pytest.approx(0.8)


@pytest.mark.parametrize("key", ["beg_size", "mid_size", "end_size", "block_size", "padding_token"])
def test_a_model_with_another_input_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.min.json"
    path.write_text(json.dumps({**CONFIG, key: 512}))
    with pytest.raises(UnknownModelError, match=f"{key} is 512"):
        Labels.read(path)
