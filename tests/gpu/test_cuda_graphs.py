"""Captured CUDA graphs answer as plain runs do, size by size."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.gpu.cases import BUCKETS, assert_close, run
from tests.gpu.conftest import Open, settings

from inferq_worker.runtime.interface import Feeds, ModelRefused
from inferq_worker.runtime.ort import OrtEngine, open_engine


def chain(folder: Path) -> Path:
    return models.slow(folder, layers=40, width=256)


def rows_of(count: int, seed: int = 0) -> Feeds:
    return {"x": np.random.default_rng(seed).standard_normal((count, 256)).astype(np.float32)}


def test_every_size_captured_or_not_answers_as_a_plain_run_does(tmp_path: Path) -> None:
    path = chain(tmp_path)
    plain = open_engine(path, settings())[0]
    graphs = open_engine(path, settings(cuda_graphs=True), max_rows=32)[0]
    for seed, rows in enumerate([*BUCKETS, 3, 31, *BUCKETS, 5, *reversed(BUCKETS)]):
        feeds = rows_of(rows, seed)
        assert_close(run(graphs, feeds)["y"], run(plain, feeds)["y"], 2e-2)


def test_answers_stay_what_they_were_when_the_graph_is_replayed(tmp_path: Path) -> None:
    graphs = open_engine(chain(tmp_path), settings(cuda_graphs=True), max_rows=4)[0]
    batches = [rows_of(4, seed) for seed in range(6)]
    answers = [run(graphs, batch)["y"] for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        assert_close(answer, run(graphs, batch)["y"], 1e-3)


async def test_a_session_with_graphs_warms_up_and_serves(open_model: Open, tmp_path: Path) -> None:
    session = await open_model(chain(tmp_path), max_rows=8, cuda_graphs=True)
    assert set(await session.warm_up([1, 2, 4, 8])) == {1, 2, 4, 8}
    report = await session.run([rows_of(count) for count in (1, 2, 5)])
    assert all(not hasattr(answer, "code") for answer in report.answers)


def test_a_model_with_open_inner_axes_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"needs fixed shapes.*set runtime\.cuda_graphs = false"):
        open_engine(models.row_sums(tmp_path), settings(cuda_graphs=True), max_rows=4)


def test_a_small_batch_gains_from_a_graph(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    path = chain(tmp_path)

    def run_s(engine: OrtEngine) -> float:
        for _ in range(5):
            run(engine, rows_of(1))
        started_s = time.perf_counter()
        for _ in range(200):
            run(engine, rows_of(1))
        return time.perf_counter() - started_s

    plain_s = run_s(open_engine(path, settings())[0])
    graphs_s = run_s(open_engine(path, settings(cuda_graphs=True), max_rows=1)[0])
    record_property("graph_speed_up", round(plain_s / graphs_s, 2))
    assert graphs_s < plain_s * 1.1
