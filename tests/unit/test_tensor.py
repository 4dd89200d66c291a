"""Tensors: numpy in, bytes, numpy out; and what is refused."""

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from inferq_schemas import DTYPES, ContractError, Tensor, as_contract_error

NUMERIC = [name for name in DTYPES if name not in ("string", "bfloat16")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3)
BOUNDED = settings(max_examples=60, deadline=None)


@st.composite
def numeric_arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(NUMERIC))).newbyteorder(draw(st.sampled_from("<>")))
    array: np.ndarray[Any, Any] = draw(hnp.arrays(dtype, draw(SHAPES)))
    return array.T if draw(st.booleans()) else array


def code_of(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Tensor(**fields)
    return as_contract_error(caught.value).code


def refusal(array: Any, dtype: str | None = None) -> ContractError:
    with pytest.raises(ContractError) as caught:
        Tensor.from_numpy(array, dtype=dtype)
    return caught.value


@BOUNDED
@given(numeric_arrays())
def test_every_numeric_array_comes_back_equal_whatever_its_byte_order_and_strides(array: np.ndarray[Any, Any]) -> None:
    tensor = Tensor.from_numpy(array)
    back = tensor.to_numpy()
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.tobytes() == array.astype(back.dtype).tobytes()
    assert tensor.payload_bytes == array.nbytes


@BOUNDED
@given(hnp.arrays(object, SHAPES, elements=st.text(max_size=5)))
def test_every_array_of_texts_comes_back_equal(array: np.ndarray[Any, Any]) -> None:
    tensor = Tensor.from_numpy(array)
    back = tensor.to_numpy()
    assert (back.shape, back.dtype, tensor.dtype) == (array.shape, np.dtype(object), "string")
    assert back.ravel().tolist() == array.ravel().tolist()
    assert tensor.payload_bytes == sum(len(text.encode()) for text in array.ravel())


@BOUNDED
@given(hnp.arrays(np.uint16, SHAPES))
def test_bfloat16_travels_as_the_bits_of_either_array_type(bits: np.ndarray[Any, Any]) -> None:
    declared = Tensor.from_numpy(bits, dtype="bfloat16")
    typed = Tensor.from_numpy(bits.view(ml_dtypes.bfloat16))
    assert declared == typed
    assert declared.dtype == "bfloat16"
    assert np.array_equal(declared.to_numpy(), bits)


def test_a_fixed_width_text_array_is_sent_as_strings() -> None:
    assert Tensor.from_numpy(np.array([["a", "bc"]])).data == ("a", "bc")


def test_the_view_is_read_only_and_shares_the_bytes_of_the_tensor() -> None:
    data = bytes(8)
    view = Tensor(dtype="float32", shape=(1, 2), data=data).to_numpy()
    assert np.shares_memory(view, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    texts = Tensor(dtype="string", shape=(1,), data=("a",)).to_numpy()
    with pytest.raises(ValueError, match="read-only"):
        texts[0] = "b"


def test_validation_keeps_the_very_same_bytes_and_texts() -> None:
    data, texts = bytes(1000), ("a",) * 1000
    assert Tensor.model_validate({"dtype": "uint8", "shape": (1000,), "data": data}).data is data
    assert Tensor.model_validate({"dtype": "string", "shape": (1000,), "data": texts}).data is texts


def test_taking_an_array_copies_it_once() -> None:
    array = np.zeros(2**20, np.float32)
    tracemalloc.start()
    try:
        Tensor.from_numpy(array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * array.nbytes


@pytest.mark.parametrize(
    ("array", "mend"),
    [
        (np.array([b"a"]), "decode the bytes to str"),
        (np.array([1, "a"], dtype=object), "every element must be str"),
        (np.array([1j]), "convert it to one of"),
        (np.array(["2020-01-01"], dtype="datetime64[s]"), "convert it to one of"),
        (np.array([1], dtype="timedelta64[s]"), "convert it to one of"),
        (np.zeros(1, np.longdouble), "convert it to one of"),
        (np.zeros(1, [("a", np.int8)]), "convert it to one of"),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else "",
)
def test_an_array_outside_the_closed_list_is_refused_with_the_mend(array: np.ndarray[Any, Any], mend: str) -> None:
    error = refusal(array)
    assert error.code == "invalid_input"
    assert mend in error.message


def test_no_value_is_converted_behind_the_callers_back() -> None:
    assert ".astype('float32')" in refusal(np.zeros(1), "float32").message
    assert "float64, not bfloat16" in refusal(np.zeros(1), "bfloat16").message
    assert "not one of bool" in refusal(np.zeros(1), "float8").message


def test_nine_axes_are_too_many() -> None:
    error = refusal(np.zeros((1,) * 9))
    assert (error.code, error.message) == ("too_large", "shape: more than 8 entries")


def test_an_array_of_lone_surrogates_is_refused() -> None:
    error = refusal(np.array(["fine", "\ud800"], dtype=object))
    assert (error.code, error.message) == (
        "invalid_input",
        "data.1: is not valid Unicode: it holds a lone surrogate",
    )


def test_a_ref_has_no_payload_and_cannot_be_viewed() -> None:
    tensor = Tensor(dtype="uint8", shape=(2**40,), ref="inferq:{a}:in:x")
    assert tensor.payload_bytes == 0
    with pytest.raises(ContractError, match="fetch its payload"):
        tensor.to_numpy()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "uint8", "shape": (2,), "data": b"a"}, "invalid_input"),
        ({"dtype": "uint8", "shape": (2**53 - 1,) * 8, "data": b"a"}, "invalid_input"),
        ({"dtype": "uint8", "shape": (2**32, 2**32), "data": b""}, "invalid_input"),
        ({"dtype": "uint8", "shape": (0, 2**53 - 1), "data": b"a"}, "invalid_input"),
        ({"dtype": "string", "shape": (1,), "data": b"a"}, "invalid_input"),
        ({"dtype": "uint8", "shape": (1,), "data": ("a",)}, "invalid_input"),
        ({"dtype": "bool", "shape": (2,), "data": b"\x00\x02"}, "invalid_input"),
        ({"dtype": "uint8", "shape": (1,)}, "invalid_input"),
        ({"dtype": "uint8", "shape": (1,), "data": b"a", "ref": "k"}, "invalid_input"),
    ],
)
def test_contents_that_contradict_each_other_are_invalid_input(fields: dict[str, Any], code: str) -> None:
    assert code_of(**fields) == code


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "uint8", "shape": (-1,), "data": b""},
        {"dtype": "uint8", "shape": (True,), "data": b"a"},
        {"dtype": "uint8", "shape": (1.0,), "data": b"a"},
        {"dtype": "uint8", "shape": [1], "data": b"a"},
        {"dtype": "uint8", "shape": (1,), "data": bytearray(1)},
        {"dtype": "string", "shape": (1,), "data": ["a"]},
        {"dtype": "string", "shape": (1,), "data": (b"a",)},
        {"dtype": ">f4", "shape": (1,), "data": bytes(4)},
        {"dtype": "uint8", "shape": (1,), "ref": "a\nb"},
        {"dtype": "uint8", "shape": (1,), "ref": "k" * 2049},
        {"dtype": "uint8", "shape": (1,), "data": b"a", "order": "F"},
    ],
)
def test_types_are_strict_and_unknown_keys_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Tensor(**fields)


def test_zero_size_is_legal() -> None:
    view = Tensor(dtype="float32", shape=(2, 0, 4), data=b"").to_numpy()
    assert view.shape == (2, 0, 4)


def test_an_error_never_shows_the_payload() -> None:
    with pytest.raises(ValidationError) as caught:
        Tensor(dtype="string", shape=(1,), data=("secret", "secret"))
    assert "secret" not in str(caught.value)
    assert "secret" not in str(as_contract_error(caught.value))
