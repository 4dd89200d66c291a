"""CUDA is really used, answers as the CPU does, and moves each batch once there and once back."""

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.gpu.cases import BUCKETS, CASES, MAX_ROWS, assert_close, bfloat16_relu, only, run
from tests.gpu.conftest import Open, settings
from tests.watched import Watched

from inferq_worker.runtime import providers
from inferq_worker.runtime.interface import Feeds, RowError
from inferq_worker.runtime.ort import OrtEngine, onnxruntime, open_engine
from inferq_worker.runtime.reuse import Source

CUDA = "CUDAExecutionProvider"


async def test_the_graph_runs_on_cuda_and_nowhere_else(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(models.convolution(tmp_path))
    assert session.info.provider == CUDA
    assert not session.info.degraded
    assert set(session.info.nodes_by_provider) == {CUDA}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(120)
async def test_every_bucket_answers_as_the_cpu_does(open_model: Open, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = case.build(tmp_path)
    gpu, cpu = await open_model(path, max_rows=MAX_ROWS), await open_model(path, "cpu", max_rows=MAX_ROWS)
    await gpu.warm_up(BUCKETS)
    rng = np.random.default_rng(0)
    for rows in (*BUCKETS, 3, 31):
        feeds = case.make(rng, rows)
        assert_close(only(await gpu.run([feeds])), only(await cpu.run([feeds])), case.tolerance)


async def test_bfloat16_has_kernels_here(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(bfloat16_relu(tmp_path), batch="trust")
    bits = np.array([[0x3F80, 0xBF80, 0x0000, 0x4000]], np.uint16)  # 1, -1, 0, 2
    np.testing.assert_array_equal(only(await session.run([{"x": bits}])), [[0x3F80, 0, 0, 0x4000]])


async def test_answers_stay_what_they_were_when_later_batches_run(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(models.scale(tmp_path, features=3))
    items: list[Feeds] = [{"x": np.full((4, 3), number, np.float32)} for number in range(20)]
    answers = [only(await session.run([item])) for item in items]
    for number, answer in enumerate(answers):
        np.testing.assert_allclose(answer, np.full((4, 3), 2 * number + 1), rtol=1e-3)


def test_each_batch_goes_there_once_and_comes_back_once(tmp_path: Path) -> None:
    """The bindings copy each tensor once, and the profile shows no further copy inside the graph."""
    ort, config = onnxruntime(), settings()
    path = models.convolution(tmp_path)
    options = providers.session_options(ort, config)
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    wished, _ = providers.wishes(ort, config)
    session = ort.InferenceSession(
        path, options, providers=[(wish.provider, dict(wish.options)) for wish in wished], enable_fallback=0
    )
    watched = Watched(session)
    engine = OrtEngine(ort, session, path.name)
    engine.bind(frozenset(), ("cuda", 0))
    engine._bound._session = watched  # type: ignore[union-attr]  # bound above
    for _ in range(5):
        run(engine, {"x": np.ones((4, 3, 8, 8), np.float32)})
    assert (watched.counts["bind_ortvalue_input"], watched.counts["bind_output"], watched.counts["runs"]) == (5, 5, 5)
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event["args"] for event in events if event.get("cat") == "Node" and "kernel_time" in event["name"]]
    assert nodes
    assert {node["provider"] for node in nodes} == {CUDA}
    assert not [node["op_name"] for node in nodes if node["op_name"].startswith("Memcpy")]


def elapsed_s(action: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


@pytest.mark.timeout(120)
def test_two_threads_at_a_time_are_right_and_no_slower_than_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = models.slow(tmp_path, layers=40, width=1024)
    engine = open_engine(path, settings())[0]
    batches: list[Feeds] = [
        {"x": np.random.default_rng(seed).standard_normal((32, 1024)).astype(np.float32)} for seed in range(2)
    ]
    expected = [run(engine, batch)["y"] for batch in batches]
    rounds = 100
    wrong: list[int] = []
    spans: list[tuple[float, float]] = []

    def work(number: int) -> None:
        for _ in range(rounds):
            started_s = time.perf_counter()
            answer = run(engine, batches[number])["y"]
            spans.append((started_s, time.perf_counter()))
            if not np.allclose(answer, expected[number], rtol=1e-2, atol=1e-3):
                wrong.append(number)

    def in_turn() -> None:
        for number in range(2):
            work(number)

    def both() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    one_s = elapsed_s(in_turn)
    spans.clear()
    two_s = elapsed_s(both)
    record_property("two_threads_speed_up", round(one_s / two_s, 3))
    assert wrong == []
    spans.sort()
    assert any(later[0] < earlier[1] for earlier, later in pairwise(spans))
    assert two_s < one_s * 1.1


def test_the_next_batch_goes_to_the_device_while_a_run_is_under_way(tmp_path: Path) -> None:
    engine = open_engine(models.slow(tmp_path, layers=400, width=1024), settings())[0]
    first, second = (
        {"x": np.random.default_rng(seed).standard_normal((256, 1024)).astype(np.float32)} for seed in range(2)
    )
    expected = [run(engine, feeds)["y"] for feeds in (first, second)]
    under_way, answers, ended_s = engine.prepare(first), [], []

    def first_run() -> None:
        answers.append(under_way.run()["y"])
        ended_s.append(time.perf_counter())

    thread = threading.Thread(target=first_run)
    thread.start()
    ready = engine.prepare(second)
    ready_s = time.perf_counter()
    thread.join()
    answers.append(ready.run()["y"])
    assert ready_s < ended_s[0]
    for answer, right in zip(answers, expected, strict=True):
        assert_close(answer, right, 1e-3)


async def test_out_of_memory_has_its_code_and_leaves_the_session_alive(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(
        models.slow(tmp_path, layers=4, width=1024), max_rows=65_536, gpu_memory_limit_bytes=128 * 2**20
    )
    large, small = (np.ones((rows, 1024), np.float32) for rows in (65_536, 4))
    refused = (await session.run([{"x": large}])).answers[0]
    assert isinstance(refused, RowError)
    assert refused.code == "out_of_memory"
    assert only(await session.run([{"x": small}])).shape == (4, 1024)


async def test_running_out_of_memory_teaches_a_smaller_batch(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(
        models.slow(tmp_path, layers=4, width=1024), max_rows=65_536, gpu_memory_limit_bytes=128 * 2**20
    )
    items: list[Feeds] = [{"x": np.ones((4096, 1024), np.float32)} for _ in range(16)]
    await session.run(items)
    report = await session.run(items)
    assert not [answer for answer in report.answers if isinstance(answer, RowError)]
    (learned_rows,) = session.row_caps.values()
    assert learned_rows < 65_536


async def test_the_second_start_reuses_the_optimised_graph(
    open_model: Open, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = models.convolution(tmp_path)
    feeds: Feeds = {"x": np.ones((4, 3, 8, 8), np.float32)}
    starts = [await open_model(path, cache_dir=tmp_path / "cache") for _ in range(2)]
    assert [(start.info.cache, start.info.notes) for start in starts] == [("built", ()), ("reused", ())]
    assert starts[1].info.provider == CUDA
    assert_close(only(await starts[1].run([feeds])), only(await starts[0].run([feeds])), 1e-3)
    record_property("load_s", [round(start.info.load_s, 3) for start in starts])


@pytest.mark.timeout(120)
async def test_a_session_keeps_up_with_a_bare_loop(
    open_model: Open, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Eight jobs of four rows a batch, collated and shared out, against the library alone on 32 rows."""
    path = models.slow(tmp_path, layers=200, width=1024)
    ort, config = onnxruntime(), settings()
    wished, _ = providers.wishes(ort, config)
    bare = providers.create(ort, config, wished, Source(path))
    session = await open_model(path, max_rows=32)
    await session.warm_up([32])
    items: list[Feeds] = [{"x": np.ones((4, 1024), np.float32)} for _ in range(8)]
    whole = np.ones((32, 1024), np.float32)
    bare.run(None, {"x": whole})
    rounds = 200
    started_s = time.perf_counter()
    for _ in range(rounds):
        bare.run(None, {"x": whole})
    bare_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    for _ in range(rounds):
        await session.run(items)
    session_s = time.perf_counter() - started_s
    record_property("rows_per_s", {"bare": round(32 * rounds / bare_s), "session": round(32 * rounds / session_s)})
    assert session_s < bare_s / 0.8
