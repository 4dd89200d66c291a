"""Bodies: golden bytes, round trips, hostile bytes, and the memory that these cost."""

import json
import random
import tracemalloc
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferq_schemas import (
    DEFAULT_LIMITS,
    DTYPES,
    BatchInfo,
    ContractError,
    Job,
    Limits,
    RejectedJob,
    Result,
    ServedBy,
    Tensor,
    Timing,
    decode_jobs,
    decode_results,
    encode_bundle,
    encode_job,
    encode_result,
    encode_results,
    job_to_wire,
    result_to_wire,
)
from inferq_schemas.unpack import survey

VECTORS = Path(__file__).parents[2] / "schemas" / "vectors"
INDEX: list[dict[str, Any]] = json.loads((VECTORS / "index.json").read_text(encoding="utf-8"))
ROW = Tensor.from_numpy(np.array([[1.0, 2.0]], np.float32))
MINIMAL = Job(id="a", model="m", inputs={"x": ROW})
WIRE = {"id": "a", "model": "m", "inputs": {"x": {"dtype": "uint8", "shape": [1], "data": b"\x00"}}}
DECODERS: list[Callable[[bytes], Any]] = [decode_jobs, decode_results]


def body(name: str) -> bytes:
    return (VECTORS / f"{name}.msgpack").read_bytes()


def in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, dict):
        return {key: in_json(item) for key, item in value.items()}
    return [in_json(item) for item in value] if isinstance(value, tuple | list) else value


def vectors(key: str, kinds: set[str]) -> list[Any]:
    return [pytest.param(entry, id=entry["name"]) for entry in INDEX if key in entry and entry["kind"] in kinds]


def as_list(decoded: Any) -> list[Any]:
    return decoded if isinstance(decoded, list) else [decoded]


@pytest.mark.parametrize("entry", vectors("decoded", {"job", "bundle"}))
def test_golden_jobs_decode_and_encode_to_the_same_bytes(entry: dict[str, Any]) -> None:
    raw = body(entry["name"])
    jobs = decode_jobs(raw)
    assert all(isinstance(job, Job) for job in jobs)
    accepted = [job for job in jobs if isinstance(job, Job)]
    assert [in_json(job_to_wire(job)) for job in accepted] == as_list(entry["decoded"])
    assert (encode_bundle(accepted) if entry["kind"] == "bundle" else encode_job(accepted[0])) == raw


@pytest.mark.parametrize("entry", vectors("decoded", {"result", "result_bundle"}))
def test_golden_results_decode_and_encode_to_the_same_bytes(entry: dict[str, Any]) -> None:
    raw = body(entry["name"])
    results = decode_results(raw)
    assert [in_json(result_to_wire(result)) for result in results] == as_list(entry["decoded"])
    assert (encode_results(results) if entry["kind"] == "result_bundle" else encode_result(results[0])) == raw


@pytest.mark.parametrize("entry", vectors("reads_as", {"result"}))
def test_golden_results_of_later_versions_are_read_without_what_they_added(entry: dict[str, Any]) -> None:
    assert [result_to_wire(result) for result in decode_results(body(entry["name"]))] == [entry["reads_as"]]


@pytest.mark.parametrize("entry", vectors("code", {"job", "bundle", "result"}))
def test_golden_bad_bodies_are_refused_with_their_code(entry: dict[str, Any]) -> None:
    raw = body(entry["name"])
    if entry["scope"] == "job":
        (rejected,) = decode_jobs(raw)
        assert isinstance(rejected, RejectedJob)
        assert rejected.error.code == entry["code"]
        return
    with pytest.raises(ContractError) as caught:
        (decode_results if entry["kind"] == "result" else decode_jobs)(raw)
    assert caught.value.code == entry["code"]


def test_every_vector_file_is_listed_and_every_listed_file_is_there() -> None:
    assert sorted(f"{entry['name']}.msgpack" for entry in INDEX) == sorted(p.name for p in VECTORS.glob("*.msgpack"))


def test_a_bad_job_does_not_take_its_bundle_along() -> None:
    jobs = decode_jobs(msgpack.packb([WIRE, WIRE | {"id": "b", "v": 2}, 7, WIRE | {"id": "no id"}, WIRE | {"id": "c"}]))
    assert [job.id for job in jobs] == ["a", "b", "", "", "c"]
    assert [job.error.code if isinstance(job, RejectedJob) else None for job in jobs] == [
        None,
        "unsupported_version",
        "malformed",
        "malformed",
        None,
    ]


def test_a_lane_without_bundles_refuses_them_and_takes_single_jobs() -> None:
    with pytest.raises(ContractError, match="send bundles to a bulk lane"):
        decode_jobs(encode_bundle([MINIMAL]), bundle=False)
    assert decode_jobs(encode_job(MINIMAL), bundle=False) == (MINIMAL,)


@pytest.mark.parametrize(
    "limits",
    [Limits(inputs=1), Limits(rank=1), Limits(params=1), Limits(text_bytes=1)],
    ids=["inputs", "rank", "params", "text"],
)
def test_a_deployment_can_tighten_what_the_schema_allows(limits: Limits) -> None:
    job = Job(id="a", model="m", inputs={"x": ROW, "y": ROW}, params={"p": "ä", "q": 1})
    (rejected,) = decode_jobs(encode_job(job), limits=limits)
    assert isinstance(rejected, RejectedJob)
    assert (rejected.id, rejected.error.code) == ("a", "too_large")


def test_a_body_above_the_limit_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(ContractError, match="too_large: body: 11 bytes, at most 10; send large tensors as a ref"):
        decode_jobs(b"\xc1" * 11, limits=Limits(body_bytes=10))


def test_what_a_receiver_would_refuse_is_not_encoded() -> None:
    big = Tensor(dtype="uint8", shape=(1, DEFAULT_LIMITS.body_bytes), data=bytes(DEFAULT_LIMITS.body_bytes))
    job, result = Job(id="a", model="m", inputs={"x": big}), Result("a", "ok", {"y": big})
    encodings: list[Callable[[], bytes]] = [
        lambda: encode_job(job),
        lambda: encode_bundle([job, job]),
        lambda: encode_result(result),
        lambda: encode_bundle([MINIMAL] * 257),
        lambda: encode_results([Result("a", "ok")] * 257),
    ]
    for encode in encodings:
        with pytest.raises(ContractError) as caught:
            encode()
        assert caught.value.code == "too_large"


def test_what_is_hopelessly_large_is_refused_without_being_copied() -> None:
    big = Tensor(dtype="uint8", shape=(1, 2**25), data=bytes(2**25))
    job = Job(id="a", model="m", inputs={"x": big})
    tracemalloc.start()
    try:
        with pytest.raises(ContractError, match="too_large: body: 33554432 bytes"):
            encode_job(job)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xc7\x00\x05", "extension type 5 of 0 bytes"),
        (b"\xd4\x05\x00", "the value at byte 0 is an extension type"),
        (b"\x91" * 9 + b"\xdc\x01\x01" + b"\xc0" * 257, "nested deeper than 8 at byte 9"),
        (b"\xc1", "the value at byte 0 is reserved"),
        (b"", "ends in the middle of a value, at byte 0"),
    ],
)
def test_the_place_of_the_damage_is_named(raw: bytes, message: str) -> None:
    for decode in DECODERS:
        with pytest.raises(ContractError, match=f"malformed: body: .*{message}"):
            decode(raw)


def test_a_bundle_to_be_encoded_has_jobs_of_one_model() -> None:
    for jobs in ([], [MINIMAL, MINIMAL.model_copy(update={"model": "n"})]):
        with pytest.raises(ContractError, match="malformed"):
            encode_bundle(jobs)


def test_a_full_bundle_of_the_largest_jobs_is_within_the_budget() -> None:
    inputs = {f"x{i}": Tensor(dtype="uint8", shape=(1,), data=b"a") for i in range(64)}
    jobs = [Job(id=f"j{i}", model="m", inputs=inputs, params={"p": i}) for i in range(256)]
    assert decode_jobs(encode_bundle(jobs)) == tuple(jobs)


def test_a_long_string_tensor_is_within_the_budget_and_a_longer_one_is_not() -> None:
    texts = Tensor(dtype="string", shape=(1, 200_000), data=("ab",) * 200_000)
    job = Job(id="a", model="m", inputs={"x": texts})
    assert decode_jobs(encode_job(job)) == (job,)
    with pytest.raises(ContractError, match="too_large: body: more than 100000 entries"):
        decode_jobs(encode_job(job), limits=Limits(items=100_000))


TENSORS = st.builds(
    lambda name, shape, fill: Tensor(
        dtype=name,
        shape=shape,
        data=("ü" * (fill % 3),) * int(np.prod(shape))
        if name == "string"
        else bytes([fill if name != "bool" else fill % 2]) * (int(np.prod(shape)) * DTYPES[name].item_bytes),
    ),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 3), max_size=4).map(lambda rest: (2, *rest)),
    st.integers(0, 255),
)
NAMES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=5))
JOBS = st.builds(
    Job,
    id=st.from_regex(r"[A-Za-z0-9_.:-]{1,20}", fullmatch=True),
    model=st.just("m"),
    version=st.none() | st.just("1.0"),
    inputs=st.dictionaries(NAMES, TENSORS, min_size=1, max_size=3),
    deadline_unix_ms=st.none() | st.integers(0, 2**53 - 1),
    sent_unix_ms=st.none() | st.integers(0, 2**53 - 1),
    fallback=st.sampled_from(["allow", "never"]),
    late=st.sampled_from(["drop", "serve"]),
    force=st.booleans(),
    params=st.dictionaries(NAMES, SCALARS, max_size=3),
)
MILLISECONDS = st.floats(0, 1e9)
RESULTS = st.builds(
    Result,
    id=st.text(max_size=8),
    status=st.just("ok"),
    outputs=st.dictionaries(NAMES, TENSORS, max_size=3),
    late=st.booleans(),
    fallback=st.booleans(),
    served_by=st.none() | st.just(ServedBy("m", "1", "cpu", "CPUExecutionProvider", "w")),
    timing_ms=st.none() | st.builds(Timing, MILLISECONDS, MILLISECONDS, MILLISECONDS, MILLISECONDS, MILLISECONDS),
    batch=st.none() | st.just(BatchInfo(3, "wait")),
)
BOUNDED = settings(max_examples=60, deadline=None)


@BOUNDED
@given(st.lists(JOBS, min_size=1, max_size=3))
def test_every_bundle_comes_back_equal(jobs: list[Job]) -> None:
    assert decode_jobs(encode_bundle(jobs)) == tuple(jobs)
    assert decode_jobs(encode_job(jobs[0])) == (jobs[0],)


@BOUNDED
@given(st.lists(RESULTS, min_size=1, max_size=3))
def test_every_array_of_results_comes_back_equal(results: list[Result]) -> None:
    assert decode_results(encode_results(results)) == tuple(results)
    assert decode_results(encode_result(results[0])) == (results[0],)


def survive(decode: Callable[[bytes], Any], raw: bytes) -> None:
    try:
        decode(raw)
    except ContractError as error:
        assert len(error.message) <= 500  # noqa: PT017 - an error is one of two good outcomes here


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xc7\x00\xff")
@example(b"\x81\xc4\x01a\x01")
def test_arbitrary_bytes_raise_nothing_else(raw: bytes) -> None:
    for decode in DECODERS:
        survive(decode, raw)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*WIRE, "v", "status", "outputs", "error", "dtype", "shape", "data", "ref", "params"]),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*Job.model_fields, "status", "outputs", "error", "batch"]), VALUES), VALUES)
def test_arbitrary_values_under_known_keys_raise_nothing_else(fields: dict[str, Any], value: Any) -> None:
    job = WIRE | fields
    nested = WIRE | {"inputs": {"x": value}, "status": "ok", "outputs": {"y": value}}
    for content in (job, [job, value], nested, job | {"inputs": {"x": WIRE["inputs"]["x"] | fields}}):  # type: ignore[index] # WIRE is a plain map
        for decode in DECODERS:
            survive(decode, msgpack.packb(content))


def test_mutated_golden_bytes_raise_nothing_else() -> None:
    chance = random.Random(7)  # noqa: S311 - reproducible, not secret
    originals = [raw for entry in INDEX if len(raw := body(entry["name"])) < 2_000]
    for _ in range(4_000):
        mutant = bytearray(chance.choice(originals) or b"\x80")
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(mutant))
            match chance.randrange(3):
                case 0:
                    mutant[at] = chance.randrange(256)
                case 1:
                    mutant[at:at] = chance.randbytes(2)
                case _:
                    del mutant[at + 1 :]
        for decode in DECODERS:
            survive(decode, bytes(mutant))


def nest(head: bytes, count: int) -> bytes:
    return head * count


HOSTILE = {
    "nested array claims": nest(b"\xdc\x01\x00", 1_000),
    "nested long array claims": nest(b"\xdd\x00\x03\xff\xff", 1_000) + b"\xc0" * 300_000,
    "nested map claims": nest(b"\xde\x00\x40\xa1a", 1_000),
    "an array of empty maps": b"\xdd\x00\x0f\x00\x00" + b"\x80" * 0xF0000,
    "arrays of empty maps": b"\xdc\x01\x00" + (b"\xdc\x01\x00" + b"\x80" * 256) * 256,
    "arrays of short texts": b"\xdc\x01\x00" + (b"\xdc\x01\x00" + b"\xa2ab" * 256) * 256,
    "a long array of short texts": b"\xdd\x00\x03\xff\xff" + b"\xa2ab" * 0x3FFFF,
    "a longer array of short texts": b"\xdd\x00\x28\x00\x00" + b"\xa2ab" * 0x280000,
    "open arrays of short texts": (b"\xdc\x01\x00" + b"\xa2ab" * 255) * 900,
    "an array claim of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map claim of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a bin claim of 4 billion": b"\xc6\xff\xff\xff\xff",
    "100,000 levels": nest(b"\x91", 100_000),
    "a wide text": b"\xdb\x00\x7f\xff\x00" + b"a" * (0x7FFF00 - 4) + "\U0001f680".encode(),
    "unknown keys": msgpack.packb(WIRE | {"inputs": {f"x{i}": {f"k{j}": 1 for j in range(64)} for i in range(64)}}),
    "a string tensor of numbers": msgpack.packb(
        WIRE | {"inputs": {"x": {"dtype": "string", "shape": [1, 50_000], "data": [5] * 50_000}}}
    ),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("decode", DECODERS)
def test_a_hostile_body_costs_a_small_multiple_of_its_size(decode: Callable[[bytes], Any], raw: bytes) -> None:
    tracemalloc.start()
    try:
        survive(decode, raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two-letter texts are the worst: 60 bytes of memory for 3 of body, and at most 262,144 of them.
    assert peak < 4 * 2**20 + min(24 * len(raw), 16 * 2**20 + 5 * len(raw))


def test_the_survey_agrees_with_the_unpacker_on_what_is_whole() -> None:
    values: list[Any] = [
        None,
        True,
        -1,
        -33,
        127,
        128,
        2**16,
        2**32,
        -(2**40),
        1.5,
        "a" * 40,
        "a" * 300,
        "a" * 70_000,
        b"a" * 300,
    ]
    values += [b"a" * 70_000, [1] * 20, [1] * 70_000, {str(i): i for i in range(20)}]
    for value in values:
        raw = msgpack.packb(value)
        survey(raw, DEFAULT_LIMITS)
        for broken, what in ((raw[:-1], "ends in the middle"), (raw + b"\x00", "follow the end")):
            with pytest.raises(ContractError, match=what):
                survey(broken, DEFAULT_LIMITS)
    survey(msgpack.packb(1.5, use_single_float=True), DEFAULT_LIMITS)
