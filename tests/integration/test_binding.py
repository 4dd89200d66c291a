"""Runs through IOBinding, on the CPU provider: what a GPU would be given and what comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tests import models
from tests.watched import Watched, WatchedBinding

from inferq_worker.runtime import ort
from inferq_worker.runtime.binding import GraphRuns
from inferq_worker.runtime.interface import Array, Feeds, ModelRefused, RunFailed
from inferq_worker.runtime.ort import OrtEngine, open_engine
from inferq_worker.runtime.settings import RuntimeSettings

CPU = RuntimeSettings(provider="cpu")
HERE = ("cpu", 0)
CUDA = "CUDAExecutionProvider"
NO_GRAPHS: frozenset[int] = frozenset()


def engines(path: Path, sizes: frozenset[int] = NO_GRAPHS) -> tuple[OrtEngine, OrtEngine]:
    """The same model run the plain way and through bindings."""
    plain, bound = open_engine(path, CPU)[0], open_engine(path, CPU)[0]
    bound.bind(sizes, HERE)
    return plain, bound


def run(engine: OrtEngine, feeds: Feeds) -> Feeds:
    return engine.prepare(feeds).run()


def x(rows: int, *, seed: int = 0) -> Feeds:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)}


@pytest.mark.parametrize("sizes", [NO_GRAPHS, frozenset({1, 2, 4})])
def test_bound_runs_answer_like_plain_ones_in_any_order_of_sizes(tmp_path: Path, sizes: frozenset[int]) -> None:
    plain, bound = engines(models.scale(tmp_path, features=3), sizes)
    for seed, rows in enumerate([4, 1, 3, 4, 2, 1, 4]):
        feeds = x(rows, seed=seed)
        np.testing.assert_array_equal(run(bound, feeds)["y"], run(plain, feeds)["y"])


@pytest.mark.parametrize("sizes", [NO_GRAPHS, frozenset({2})])
def test_answers_stay_what_they_were_when_later_batches_run(tmp_path: Path, sizes: frozenset[int]) -> None:
    plain, bound = engines(models.scale(tmp_path, features=3), sizes)
    batches = [x(2, seed=seed) for seed in range(5)]
    answers = [run(bound, batch)["y"] for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, run(plain, batch)["y"])


@pytest.mark.parametrize("sizes", [NO_GRAPHS, frozenset({2})])
def test_answers_outlive_the_session(tmp_path: Path, sizes: frozenset[int]) -> None:
    _, bound = engines(models.scale(tmp_path, features=3), sizes)
    feeds = x(2)
    answer = run(bound, feeds)["y"]
    del bound
    np.testing.assert_allclose(answer, feeds["x"] * 2 + 1)


@pytest.mark.parametrize("sizes", [NO_GRAPHS, frozenset({2})])
def test_every_dtype_of_bfloat16_float16_and_integers_is_bound(tmp_path: Path, sizes: frozenset[int]) -> None:
    cases: list[tuple[Path, Feeds]] = [
        (models.bfloat16(tmp_path), {"x": np.array([[16256, 0, 1], [2, 3, 4]], np.uint16)}),
        (models.float16(tmp_path), {"x": np.array([[1, -2, 3], [0, 1, -1]], np.float16)}),
        (models.identity(tmp_path, TensorProto.INT64, ["n", 2]), {"x": np.arange(4).reshape(2, 2)}),
        (models.identity(tmp_path, TensorProto.BOOL, ["n", 2], name="bools"), {"x": np.eye(2, dtype=bool)}),
        (
            models.two_inputs_two_outputs(tmp_path),
            {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32), "k": np.array([1, 2])},
        ),
        (models.shared_factor(tmp_path), {"x": np.ones((2, 2), np.float32), "factor": np.array(3, np.float32)}),
    ]
    for path, feeds in cases:
        plain, bound = engines(path, sizes)
        for _ in range(2):  # with graphs: captured, then replayed
            expected, answer = run(plain, feeds), run(bound, feeds)
            for name, array in expected.items():
                assert answer[name].dtype == array.dtype
                np.testing.assert_array_equal(answer[name], array)


def test_strings_stay_on_the_host(tmp_path: Path) -> None:
    plain, bound = engines(models.strings(tmp_path))
    feeds: Feeds = {"x": np.array([["a"], ["b"]], object)}
    np.testing.assert_array_equal(run(bound, feeds)["y"], run(plain, feeds)["y"])


def test_views_with_strides_and_read_only_ones_are_bound(tmp_path: Path) -> None:
    plain, bound = engines(models.scale(tmp_path, features=3))
    for array in (np.frombuffer(x(4)["x"].tobytes(), np.float32).reshape(4, 3), np.ones((3, 2), np.float32).T):
        np.testing.assert_array_equal(run(bound, {"x": array})["y"], run(plain, {"x": array})["y"])


def test_each_tensor_is_bound_once_a_batch(tmp_path: Path) -> None:
    _, bound = engines(models.two_inputs_two_outputs(tmp_path))
    watched = Watched(bound._session)
    bound._bound._session = watched  # type: ignore[union-attr]  # bound above
    feeds: Feeds = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32), "k": np.array([1, 2])}
    for _ in range(3):
        run(bound, feeds)
    assert watched.counts == {
        "bindings": 3, "runs": 3, "bind_ortvalue_input": 9, "bind_output": 6, "get_outputs": 3,
    }  # fmt: skip


def test_a_captured_size_is_bound_once_for_good_and_other_sizes_capture_nothing(tmp_path: Path) -> None:
    _, bound = engines(models.scale(tmp_path, features=3), frozenset({2}))
    run(bound, x(2))
    runs = bound._bound
    assert isinstance(runs, GraphRuns)
    watched = Watched(bound._session)
    graph = runs._graphs[2]
    object.__setattr__(graph, "binding", WatchedBinding(graph.binding, watched.counts))
    runs._session = runs._plain._session = watched
    for seed in range(3):
        run(bound, x(2, seed=seed))
    assert watched.counts == {"runs": 3}
    run(bound, x(3))
    assert watched.graph_ids == ["2", "2", "2", "-1"]


def test_a_graph_that_answers_otherwise_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bound = engines(models.scale(tmp_path, features=3), frozenset({2}))
    fetch = GraphRuns._fetch

    def stale(runs: GraphRuns, value: Any, spec: Any) -> Array:
        return fetch(runs, value, spec) + 1

    monkeypatch.setattr(GraphRuns, "_fetch", stale)
    with pytest.raises(RunFailed, match=r"captured for 2 rows .* output 'y'; set runtime.cuda_graphs = false"):
        run(bound, x(2))


def test_a_bound_run_that_fails_is_reported_like_a_plain_one(tmp_path: Path) -> None:
    plain, bound = engines(models.gather(tmp_path))
    feeds: Feeds = {"i": np.array([[99]])}
    for engine in (plain, bound):
        with pytest.raises(RunFailed, match="indices element out of data bounds"):
            run(engine, feeds)
    np.testing.assert_array_equal(run(bound, {"i": np.array([[1]])})["y"], [[[1, 10]]])


def test_one_binding_used_twice_would_hand_out_the_same_memory(tmp_path: Path) -> None:
    """The habit of the library that a binding a run is there for."""
    session = ort.onnxruntime().InferenceSession(models.scale(tmp_path, features=3), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_output("y", "cpu")
    seen = []
    for value in (1, 2):
        binding.bind_cpu_input("x", np.full((2, 3), value, np.float32))
        session.run_with_iobinding(binding)
        seen.append(binding.get_outputs()[0].numpy())
    np.testing.assert_array_equal(seen[0], seen[1])


@pytest.mark.parametrize(("rows", "sizes"), [(None, {1, 2, 4, 6}), (4, {4})])
def test_graphs_are_captured_for_the_buckets_or_the_fixed_batch(
    tmp_path: Path, rows: int | None, sizes: set[int]
) -> None:
    path = models.scale(tmp_path, features=3, rows=rows or "n")
    engine, _ = open_engine(path, CPU)
    assert ort._graph_sizes(path, engine, {CUDA: 2}, (1, 2, 4, 6)) == sizes


@pytest.mark.parametrize(
    ("build", "nodes", "message"),
    [
        (models.row_sums, {CUDA: 1}, r"needs fixed shapes, and input 'x' is \[None, None, None\]; set runtime"),
        (models.float16, {CUDA: 1, "CPUExecutionProvider": 2}, r"elsewhere are \{'CPUExecutionProvider': 2\}; set"),
        (models.strings, {CUDA: 1}, "needs all nodes on the GPU"),
    ],
)
def test_a_model_that_no_graph_can_hold_is_refused_with_the_mend(
    tmp_path: Path, build: Callable[[Path], Path], nodes: dict[str, int], message: str
) -> None:
    path = build(tmp_path)
    engine, _ = open_engine(path, CPU)
    with pytest.raises(ModelRefused, match=message):
        ort._graph_sizes(path, engine, nodes, (6,))
