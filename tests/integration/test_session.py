"""Sessions over the real ONNX Runtime answer every item rightly, and say early what they cannot serve."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests import models

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import ort
from inferq_worker.runtime.fake import FakeSession
from inferq_worker.runtime.interface import (
    Array,
    Feeds,
    ModelRefused,
    RowError,
    RunReport,
    Session,
    SessionBroken,
)
from inferq_worker.runtime.session import OrtSession, open_session
from inferq_worker.runtime.settings import RuntimeSettings

CPU = RuntimeSettings(provider="cpu")
Open = Callable[..., Awaitable[OrtSession]]


@pytest.fixture(name="open_model")
async def _open_model() -> AsyncIterator[Open]:
    """Opens sessions and closes them after the test."""
    opened: list[OrtSession] = []

    async def open_model(path: Path, config: RuntimeSettings = CPU, **described: Any) -> OrtSession:
        opened.append(await open_session(ModelFile(path.stem, "1", path, **described), config))
        return opened[-1]

    yield open_model
    for each in opened:
        await each.close()


def x_rows(*counts: int, features: int = 3) -> list[Feeds]:
    rng = np.random.default_rng(7)
    return [{"x": rng.standard_normal((count, features)).astype(np.float32)} for count in counts]


def answer(report: RunReport, item: int, name: str = "y") -> Array:
    got = report.answers[item]
    assert not isinstance(got, RowError), got
    return got[name]


def assert_scaled(report: RunReport, items: Sequence[Feeds]) -> None:
    assert len(report.answers) == len(items)
    for number, item in enumerate(items):
        np.testing.assert_allclose(answer(report, number), item["x"] * 2 + 1, rtol=1e-6)


@pytest.mark.parametrize("counts", [(1,), (1,) * 32, (4, 1, 7), (100,), (3, 70, 2)])
async def test_singles_and_items_of_many_rows_are_answered_in_order(
    open_model: Open, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    opened = await open_model(models.scale(tmp_path))
    items = x_rows(*counts)
    report = await opened.run(items)
    assert_scaled(report, items)
    assert (report.rows, report.padded_rows) == (sum(counts), 0)
    assert report.run_s > 0


async def test_a_matmul_agrees_with_numpy(open_model: Open, tmp_path: Path) -> None:
    weights = np.random.default_rng(3).standard_normal((5, 2)).astype(np.float32)
    opened = await open_model(models.matmul(tmp_path, weights))
    items = x_rows(2, 1, features=5)
    report = await opened.run(items)
    for number, item in enumerate(items):
        np.testing.assert_allclose(answer(report, number), item["x"] @ weights, rtol=1e-5)


async def test_a_probe_runs_the_made_up_items_of_the_warm_up_in_the_largest_batch(
    open_model: Open, tmp_path: Path
) -> None:
    opened = await open_model(models.scale(tmp_path), max_rows=8)
    assert (await opened.probe()).answers == (), "nothing is known before the warm-up"
    await opened.warm_up([1, 8])
    report = await opened.probe()
    assert report.rows == 8
    assert [one for one in report.answers if isinstance(one, RowError)] == []
    assert report.run_s > 0


async def test_a_model_that_nobody_can_make_inputs_up_for_is_probed_by_nothing(
    open_model: Open, tmp_path: Path
) -> None:
    opened = await open_model(models.gather(tmp_path, entries=0), batch="trust")
    assert await opened.warm_up([1]) == {}
    assert await opened.probe() == RunReport((), 0.0, 0, 0)


async def test_several_inputs_and_outputs_stay_together(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.two_inputs_two_outputs(tmp_path))
    await opened.warm_up([1, 4])
    items: list[Feeds] = [
        {"a": np.full((2, 3), n, np.float32), "b": np.ones((2, 3), np.float32), "k": np.array([n, n + 1])}
        for n in range(3)
    ]
    report = await opened.run(items)
    for n in range(3):
        np.testing.assert_array_equal(answer(report, n, "total"), np.full((2, 3), n + 1))
        np.testing.assert_array_equal(answer(report, n, "ids"), [10 * n, 10 * (n + 1)])


async def test_a_fixed_batch_is_padded_and_the_padding_counted(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.fixed_batch(tmp_path, 4))
    assert opened.info.fixed_rows == 4
    assert opened.info.max_rows == 4
    await opened.warm_up([4])
    items = x_rows(1, 2, 6)
    report = await opened.run(items)
    assert_scaled(report, items)
    assert (report.rows, report.padded_rows) == (9, 3)


async def test_runs_are_padded_to_buckets_and_all_answers_are_right(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path), CPU.model_copy(update={"buckets": [4, 8]}), max_rows=16)
    assert opened.info.buckets == (4, 8, 16)
    await opened.warm_up(opened.info.buckets)
    for counts, padding in (((1, 2), 1), ((5,), 3), ((16, 1), 3), ((9,), 7), ((4, 4), 0)):
        items = x_rows(*counts)
        report = await opened.run(items)
        assert_scaled(report, items)
        assert (report.rows, report.padded_rows) == (sum(counts), padding), counts


async def test_models_choose_their_buckets_over_the_settings(open_model: Open, tmp_path: Path) -> None:
    config = CPU.model_copy(update={"buckets": [4, 8]})
    scale = models.scale(tmp_path)
    assert (await open_model(scale, config, buckets=(2,))).info.buckets == (2, 32)
    assert (await open_model(scale, config, buckets="off")).info.buckets == ()
    assert (await open_model(scale, config, batch="single")).info.buckets == ()
    assert (await open_model(models.fixed_batch(tmp_path, 4), config)).info.buckets == ()


async def test_outputs_never_share_memory_with_inputs(open_model: Open, tmp_path: Path) -> None:
    """What an answer is a view of may not be a buffer that the next batch is packed into."""
    opened = await open_model(models.identity(tmp_path, TensorProto.FLOAT, ["n", 3]))
    items = x_rows(2, 1)
    first, alone = await opened.run(items), await opened.run(items[:1])
    await opened.run(x_rows(3, 3))
    assert not np.shares_memory(answer(alone, 0), items[0]["x"])
    for number, item in enumerate(items):
        np.testing.assert_array_equal(answer(first, number), item["x"])


async def test_a_real_session_is_rebuilt_from_its_file(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path))
    await opened.warm_up([1, 4])
    await opened.rebuild()
    items = x_rows(1, 3)
    assert_scaled(await opened.run(items), items)


async def test_a_session_is_not_rebuilt_from_another_file(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path))
    await opened.warm_up([1, 4])
    models.write(
        tmp_path / "scale.onnx",
        [helper.make_node("Neg", ["x"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", "features"])],
        [("y", TensorProto.FLOAT, ["n", "features"])],
    )
    with pytest.raises(SessionBroken, match="not the file any more"):
        await opened.rebuild()


async def test_inner_shapes_that_differ_are_run_apart(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.row_sums(tmp_path))
    await opened.warm_up([1, 2])
    items: list[Feeds] = [{"x": np.ones((1, h, w), np.float32)} for h, w in ((2, 3), (4, 5), (2, 3))]
    report = await opened.run(items)
    assert [float(answer(report, n)[0]) for n in range(3)] == [6, 20, 6]


async def test_strings_come_back_whole(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.strings(tmp_path))
    await opened.warm_up([2])
    report = await opened.run([{"x": np.array([[text]], object)} for text in ("a\0b", "grüße", "")])
    assert [answer(report, n).tolist() for n in range(3)] == [[["a\0b"]], [["grüße"]], [[""]]]


async def test_float16_keeps_its_type(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.float16(tmp_path))
    await opened.warm_up([2])
    report = await opened.run([{"x": np.array([[-1, 0, 2]], np.float16)}] * 2)
    assert answer(report, 1).dtype == np.float16
    np.testing.assert_array_equal(answer(report, 1), [[0, 0, 2]])


async def test_bfloat16_goes_in_and_out_bit_by_bit(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.bfloat16(tmp_path))
    await opened.warm_up([2])
    values = np.array([[1.0, -2.5, 3.140625]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    report = await opened.run([{"x": bits}] * 2)
    np.testing.assert_array_equal(answer(report, 0, "wide"), values)
    np.testing.assert_array_equal(answer(report, 1, "same"), bits)


async def test_a_shared_scalar_reaches_all_rows_of_its_items(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.shared_factor(tmp_path), shared_inputs=frozenset({"factor"}))
    await opened.warm_up([2])
    items: list[Feeds] = [
        {"x": np.ones((1, 2), np.float32), "factor": np.array(factor, np.float32)} for factor in (2, 3, 2)
    ]
    report = await opened.run(items)
    assert [float(answer(report, n)[0, 0]) for n in range(3)] == [2, 3, 2]


async def test_read_only_views_of_a_message_are_answered(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path))
    body = b"abc" + np.arange(6, dtype="<f4").tobytes()
    unaligned = np.frombuffer(body, "<f4", offset=3).reshape(2, 3)
    assert_scaled(await opened.run([{"x": unaligned}]), [{"x": unaligned}])


async def test_a_later_run_leaves_earlier_answers_alone(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.identity(tmp_path, TensorProto.FLOAT, ["n", 3]))
    first = await opened.run([{"x": np.full((1, 3), 1, np.float32)}] * 2)
    await opened.run([{"x": np.full((1, 3), 9, np.float32)}] * 2)
    np.testing.assert_array_equal(answer(first, 0), np.full((1, 3), 1))
    np.testing.assert_array_equal(answer(first, 1), np.full((1, 3), 1))


async def test_many_callers_at_a_time_each_get_their_own_answers(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path), RuntimeSettings(provider="cpu", slots=3))
    batches = [
        [{"x": np.full((n % 5 + 1, 3), n, np.float32)}, {"x": np.full((1, 3), -n, np.float32)}] for n in range(60)
    ]
    for report, items in zip(await asyncio.gather(*map(opened.run, batches)), batches, strict=True):
        assert_scaled(report, items)


async def test_a_poison_row_among_32_costs_only_its_own_answer(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.gather(tmp_path))
    await opened.warm_up([32])
    indices = [n % 4 for n in range(32)]
    indices[17] = 99
    report = await opened.run([{"i": np.array([[index]])} for index in indices])
    for number, index in enumerate(indices):
        if number == 17:
            continue
        np.testing.assert_array_equal(answer(report, number), [[[index, 10 * index]]])
    poison = report.answers[17]
    assert isinstance(poison, RowError)
    assert poison.code == "inference_failed"
    assert "Gather" in poison.message
    assert len(poison.message) <= 300


async def test_a_failed_run_prints_nothing(open_model: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened = await open_model(models.gather(tmp_path))
    await opened.run([{"i": np.array([[99]])}])
    assert capfd.readouterr() == ("", "")


async def test_an_item_that_does_not_fit_is_refused_without_a_run(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.fixed_batch(tmp_path, 2))
    good = x_rows(1)[0]
    report = await opened.run([{"x": np.zeros((1, 3), ">f4")}, good, {"x": np.zeros((1, 3), "S4")}])
    assert [isinstance(each, RowError) for each in report.answers] == [True, False, True]
    assert report.rows == 1


@pytest.mark.parametrize(
    "array", [np.array([[b"abc"]], "S3"), np.array([[b"abc"]], "S40"), np.array([["abc"]]).astype(">U3"), None]
)
async def test_bytes_never_reach_the_native_code_as_text(open_model: Open, tmp_path: Path, array: Array | None) -> None:
    """ONNX Runtime reads past the end of byte strings, and hands neighbouring memory out."""
    opened = await open_model(models.strings(tmp_path))
    good: Feeds = {"x": np.array([["a\0b"]], object)}
    bad: Feeds = {"x": np.array([[b"abc"]], object) if array is None else array}
    report = await opened.run([bad, good])
    refused = report.answers[0]
    assert isinstance(refused, RowError)
    assert refused.code == "invalid_input"
    assert answer(report, 1).tolist() == [["a\0b"]]


async def test_a_model_for_single_rows_answers_jobs_of_many(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.fixed_batch(tmp_path, 1))
    assert (opened.info.fixed_rows, opened.info.max_rows) == (1, 1)
    await opened.warm_up([1])
    items = x_rows(1, 3, 1)
    report = await opened.run(items)
    assert_scaled(report, items)
    assert (report.rows, report.padded_rows) == (5, 0)


async def test_an_input_with_a_default_is_left_to_the_model(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.optional_input(tmp_path))
    assert [spec.name for spec in opened.info.inputs] == ["x"]
    await opened.warm_up([1, 2])
    (item,) = x_rows(2)
    report = await opened.run([item, {**item, "bias": np.zeros(3, np.float32)}])
    np.testing.assert_array_equal(answer(report, 0), item["x"] + np.array([1, 2, 3], np.float32))
    refused = report.answers[1]
    assert isinstance(refused, RowError)
    assert "the model wants x" in refused.message


async def test_the_order_of_threads_and_memory_changes_no_answer(open_model: Open, tmp_path: Path) -> None:
    weights = np.random.default_rng(3).standard_normal((5, 2)).astype(np.float32)
    path = models.matmul(tmp_path, weights)
    (item,) = x_rows(4, features=5)
    for config in (
        {"execution_mode": "parallel", "inter_op_threads": 2},
        {"intra_op_threads": 2},
        {"memory_pattern": True},
        {"graph_optimization": "off"},
        {"graph_optimization": "layout"},
    ):
        opened = await open_model(path, RuntimeSettings.model_validate({"provider": "cpu", **config}))
        for _ in range(3):
            np.testing.assert_allclose(answer(await opened.run([item]), 0), item["x"] @ weights, rtol=1e-5)


async def test_running_out_of_memory_has_its_own_code(open_model: Open, tmp_path: Path) -> None:
    path = models.write(
        tmp_path / "bomb.onnx",
        [
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["n", 1]), ("shape", TensorProto.INT64, ["n"])],
        [("y", TensorProto.FLOAT, ["n", 1])],
    )
    opened = await open_model(path, batch="trust")
    report = await opened.run([{"x": np.ones((1, 1), np.float32), "shape": np.array([10**13])}])
    assert isinstance(report.answers[0], RowError)
    assert report.answers[0].code == "out_of_memory"


async def test_a_model_that_averages_over_the_batch_is_refused(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.batch_mean(tmp_path))
    with pytest.raises(ModelRefused, match=r"^batch_mean: .*other rows.*batch = \"single\"") as caught:
        await opened.warm_up([1, 8])
    assert "depend" in str(caught.value)


async def test_a_fixed_batch_whose_padding_would_change_answers_is_refused(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.batch_mean(tmp_path, rows=4))
    with pytest.raises(ModelRefused, match="depend"):
        await opened.warm_up([4])


async def test_an_output_whose_first_axis_only_looks_like_rows_is_refused_when_probed(
    open_model: Open, tmp_path: Path
) -> None:
    opened = await open_model(models.total_over_rows(tmp_path, features="w", keepdims=0))
    with pytest.raises(ModelRefused, match=r"output 'y' has the shape \[8\] for 4 rows in"):
        await opened.warm_up([4])


async def test_a_sum_over_rows_is_refused_at_load(open_model: Open, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="output 'y' has a first axis of 1 whatever the number of rows"):
        await open_model(models.total_over_rows(tmp_path))


async def test_a_model_declared_single_runs_each_item_alone_and_whole(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.batch_mean(tmp_path), batch="single")
    assert not opened.info.batchable
    assert set(await opened.warm_up([1, 8])) == {1, 8}
    items = x_rows(2, 3)
    report = await opened.run(items)
    for number, item in enumerate(items):
        np.testing.assert_allclose(answer(report, number), item["x"] - item["x"].mean(axis=0), rtol=1e-5, atol=1e-6)


async def test_a_trusted_model_is_not_probed(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.batch_mean(tmp_path), batch="trust")
    assert set(await opened.warm_up([2])) == {2}


async def test_a_scalar_that_is_not_declared_shared_is_refused(open_model: Open, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r'shared_inputs = \["factor"\]'):
        await open_model(models.shared_factor(tmp_path))


async def test_warm_up_returns_steady_seconds_for_each_size(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path))
    steady = await opened.warm_up([1, 4, 16, 40])
    assert set(steady) == {1, 4, 16, 40}
    assert all(0 < elapsed_s < 5 for elapsed_s in steady.values())


class Held:
    """An engine whose runs wait at a gate: what a long native call looks like."""

    def __init__(self, real: Any) -> None:
        self.inputs, self.outputs, self._real = real.inputs, real.outputs, real
        self.began, self.gate = threading.Event(), threading.Event()
        self.seen: list[Array] = []

    def prepare(self, feeds: Feeds) -> "HeldRun":
        return HeldRun(self, feeds, self._real.prepare(feeds))


class HeldRun:
    """One run of it."""

    def __init__(self, engine: Held, feeds: Feeds, real: Any) -> None:
        self._engine, self._feeds, self._real = engine, feeds, real

    def run(self) -> Feeds:
        self._engine.began.set()
        assert self._engine.gate.wait(20)
        self._engine.seen.append(self._feeds["x"].copy())
        outputs: Feeds = self._real.run()
        return outputs

    def stop(self) -> None:
        self._real.stop()


@pytest.fixture(name="held")
def _held(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """The engines opened during the test, each behind a gate."""
    opened: list[Held] = []
    real_open = ort.open_engine

    def open_held(path: Path, config: RuntimeSettings, *rest: Any) -> Any:
        engine, placement = real_open(path, config)
        opened.append(Held(engine))
        return opened[-1], placement

    monkeypatch.setattr(ort, "open_engine", open_held)
    return opened


async def test_cancelling_the_waiter_does_not_corrupt_that_run_or_the_next(
    open_model: Open, tmp_path: Path, held: list[Held]
) -> None:
    opened = await open_model(models.scale(tmp_path))
    first, second = x_rows(1, 1), x_rows(2, 2)
    cancelled = asyncio.create_task(opened.run(first))
    await asyncio.to_thread(held[0].began.wait, 20)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    following = asyncio.create_task(opened.run(second))
    await asyncio.sleep(0)
    held[0].gate.set()
    assert_scaled(await following, second)
    np.testing.assert_array_equal(held[0].seen[0], np.concatenate([item["x"] for item in first]))


async def test_closing_waits_for_the_run_in_flight(open_model: Open, tmp_path: Path, held: list[Held]) -> None:
    opened = await open_model(models.scale(tmp_path))
    items = x_rows(1)
    running = asyncio.create_task(opened.run(items))
    await asyncio.to_thread(held[0].began.wait, 20)
    closing = asyncio.create_task(opened.close())
    await asyncio.sleep(0)
    assert not closing.done()
    held[0].gate.set()
    await closing
    assert_scaled(await running, items)


async def test_closing_waits_for_a_run_whose_waiter_was_cancelled(
    open_model: Open, tmp_path: Path, held: list[Held]
) -> None:
    opened = await open_model(models.scale(tmp_path))
    cancelled = asyncio.create_task(opened.run(x_rows(1)))
    await asyncio.to_thread(held[0].began.wait, 20)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    closing = asyncio.create_task(opened.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    held[0].gate.set()
    await closing
    assert len(held[0].seen) == 1


async def test_the_fake_session_keeps_the_same_promises(open_model: Open, tmp_path: Path) -> None:
    items = x_rows(1, 3, features=4)
    opened = await open_model(models.scale(tmp_path, features=4))
    sessions: list[Session] = [opened, FakeSession()]
    for each in sessions:
        assert set(await each.warm_up([1, 2])) == {1, 2}
        report = await each.run(items)
        assert report.rows == 4
        assert [answer(report, number).shape for number in range(2)] == [(1, 4), (3, 4)]
        await each.close()
        with pytest.raises(SessionBroken):
            await each.run(items)


async def test_a_closed_session_says_so(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.scale(tmp_path))
    await opened.close()
    with pytest.raises(SessionBroken, match="closed"):
        await opened.run(x_rows(1))


async def test_the_event_loop_goes_on_during_a_run(open_model: Open, tmp_path: Path, held: list[Held]) -> None:
    opened = await open_model(models.scale(tmp_path))
    running = asyncio.create_task(opened.run(x_rows(1)))
    await asyncio.to_thread(held[0].began.wait, 20)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    held[0].gate.set()
    await running


async def test_cancelling_a_native_run_midway_leaves_the_next_answer_right(open_model: Open, tmp_path: Path) -> None:
    opened = await open_model(models.slow(tmp_path, layers=20, width=256))
    ones, twos = ([{"x": np.full((1, 256), value, np.float32)}] * 8 for value in (1, 2))
    expected = answer(await opened.run(twos), 7)
    cancelled = asyncio.create_task(opened.run(ones))
    await asyncio.sleep(0)
    cancelled.cancel()
    np.testing.assert_array_equal(answer(await opened.run(twos), 7), expected)


async def test_a_lost_device_breaks_the_session_and_not_the_items(
    open_model: Open, tmp_path: Path, held: list[Held]
) -> None:
    opened = await open_model(models.scale(tmp_path))
    held[0].gate.set()
    held[0]._real._session = LostDevice()
    with pytest.raises(SessionBroken, match="illegal memory access"):
        await opened.run(x_rows(1, 1))


class LostDevice:
    def run(self, *_: object) -> None:
        raise RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0")
