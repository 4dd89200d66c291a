from typing import Any

import numpy as np
import pytest

from inferq.lines import MAX_LINE_BYTES
from inferq.records import BadRecord, InputError, JsonLines, Reading, Record, look_ahead, parse_record, to_dtype
from inferq_schemas import Tensor

PLAIN = Reading({})


def array(record: Record, name: str = "x") -> np.ndarray[Any, Any]:
    value = record.inputs[name]
    assert isinstance(value, np.ndarray)
    return value


def test_the_short_form_is_the_map_of_inputs() -> None:
    record = parse_record(b'{"x": [[1.5, 2]], "n": [[7]], "t": [["a"]], "b": [[true]]}', PLAIN)

    assert {name: array(record, name).dtype.name for name in record.inputs} == {
        "x": "float32",
        "n": "int64",
        "t": "str32",
        "b": "bool",
    }
    assert (record.id, record.params, record.deadline_s) == (None, None, None)


def test_the_long_form_has_id_params_and_deadline() -> None:
    record = parse_record(b'{"inputs": {"x": [[1]]}, "id": "a", "params": {"k": 3}, "deadline_s": 2.5}', PLAIN)

    assert (record.id, record.params, record.deadline_s) == ("a", {"k": 3}, 2.5)


def test_an_input_may_be_called_inputs() -> None:
    assert array(parse_record(b'{"inputs": [[1]]}', PLAIN), "inputs").shape == (1, 1)


def test_raw_bytes_come_as_base64() -> None:
    record = parse_record(b'{"x": {"dtype": "uint8", "shape": [1, 4], "data_base64": "AQIDBA=="}}', PLAIN)

    assert record.inputs["x"] == Tensor(dtype="uint8", shape=(1, 4), data=b"\x01\x02\x03\x04")


def test_the_command_line_says_dtypes_and_adds_the_batch_axis() -> None:
    reading = Reading({"x": "float16", "b": "bfloat16"}, add_batch_axis=True)

    record = parse_record(b'{"x": [1, 2, 3], "b": [1.0, -2.5]}', reading)

    assert array(record).dtype == np.float16
    assert array(record).shape == (1, 3)
    assert record.inputs["b"] == Tensor(dtype="bfloat16", shape=(1, 2), data=b"\x80\x3f\x20\xc0")


def test_bfloat16_rounds_to_nearest_even() -> None:
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)

    tensor = to_dtype(halves, "bfloat16")

    assert isinstance(tensor, Tensor)
    assert tensor.to_numpy().tolist() == [0x3F80, 0x3F82, 0x3F81]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "must be an object"),
        (b"{}", "no inputs"),
        (b'{"inputs": {}}', "no inputs"),
        (b'{"inputs": {"x": [[1]]}, "deadline": 3}', "unknown key 'deadline'.*deadline_s"),
        (b'{"inputs": {"x": [[1]]}, "id": 3}', "'id' must be a text"),
        (b'{"inputs": {"x": [[1]]}, "deadline_s": true}', "'deadline_s' must be a number"),
        (b'{"x": [[1, 2], [3]]}', "'x': rows of different length"),
        (b'{"x": [[1, "a"]]}', "'x': use numbers"),
        (b'{"x": [[null]]}', "'x': use numbers"),
        (b'{"x": [[36893488147419103232]]}', "'x'"),
        (b'{"x": {"dtype": "uint8", "shape": [1]}}', "data_base64"),
        (b'{"x": {"dtype": "uint8", "shape": [1], "data_base64": "?"}}', "cannot be read"),
        (b'{"x": {"dtype": "uint8", "shape": [2], "data_base64": "AQ=="}}', "needs 2 bytes"),
        (b'{"x": {"dtype": "odd", "shape": [1], "data_base64": "AQ=="}}', "dtype"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_record(line, PLAIN)


def test_texts_do_not_become_numbers() -> None:
    with pytest.raises(InputError, match="--dtype"):
        to_dtype(np.array(["1"]), "int64")


def test_lines_are_counted_and_a_bad_one_costs_only_itself() -> None:
    lines = JsonLines(Reading({}))

    found = [lines.record(line) for line in (b'{"x": [[1]]}\n', b"\n", b"nonsense\n", b'{"x": [[2]]}')]

    assert found[1] is None
    assert isinstance(found[2], BadRecord)
    assert (found[2].place, found[2].problem[:8]) == ("line 3", "not JSON")
    good = [record for record in found if isinstance(record, Record)]
    assert [(record.place, array(record).item()) for record in good] == [("line 1", 1), ("line 4", 2)]


def test_a_line_above_the_limit_is_a_bad_one() -> None:
    found = JsonLines(Reading({})).record(b" " * (MAX_LINE_BYTES + 1))

    assert isinstance(found, BadRecord)
    assert "longer than 64 MiB" in found.problem


def test_whole_numbers_stay_whole_until_their_input_had_a_fraction() -> None:
    reading = Reading({})
    lines = [b'{"x": [[1]], "n": [[1]]}', b'{"x": [[1.0]], "n": [[2]]}', b'{"x": [[2]], "n": [[3]]}']

    records = [parse_record(line, reading) for line in lines]

    assert [array(record).dtype.name for record in records] == ["int64", "float32", "float32"]
    assert {array(record, "n").dtype.name for record in records} == {"int64"}


def test_a_dtype_of_the_command_line_goes_before_what_was_seen() -> None:
    reading = Reading({"x": "int32"})
    parse_record(b'{"x": [[1.0]]}', reading)

    assert array(parse_record(b'{"x": [[2]]}', reading)).dtype == np.int32


def test_an_empty_row_says_nothing_about_the_dtype() -> None:
    reading = Reading({})
    parse_record(b'{"x": [[]]}', reading)

    assert array(parse_record(b'{"x": [[2]]}', reading)).dtype == np.int64


def test_the_first_lines_of_a_file_decide_before_any_is_sent() -> None:
    reading = Reading({})
    look_ahead([b'{"x": [[1]]}', b"nonsense", b'{"x": [[0.5]]}'], reading)

    assert array(parse_record(b'{"x": [[1]]}', reading)).dtype == np.float32
