"""The second start loads what the first one optimised, with the same answers, and never anything else."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests import models

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import hardware
from inferq_worker.runtime.interface import Feeds, ModelRefused, RowError, SessionInfo
from inferq_worker.runtime.session import open_session
from inferq_worker.runtime.settings import RuntimeSettings

FLOATS = np.random.default_rng(1).standard_normal


def cached(tmp_path: Path, **values: Any) -> RuntimeSettings:
    return RuntimeSettings.model_validate({"provider": "cpu", "cache_dir": tmp_path / "cache", **values})


async def start(
    path: Path, config: RuntimeSettings, feeds: Feeds | None = None, *, shared: frozenset[str] = frozenset()
) -> tuple[SessionInfo, Feeds]:
    """What one start of a worker finds and answers."""
    session = await open_session(ModelFile("m", "1", path, shared_inputs=shared), config)
    try:
        if feeds is None:
            return session.info, {}
        await session.warm_up([1, 2])
        (answer,) = (await session.run([feeds])).answers
        assert not isinstance(answer, RowError), answer
        return session.info, answer
    finally:
        await session.close()


def entries(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / f"inferq-{os.getuid()}"
    return sorted(path for path in folder.iterdir() if path.is_dir())


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def normal(*shape: int) -> np.ndarray:
    return FLOATS(shape).astype(np.float32)


def small(folder: Path) -> Path:
    return models.matmul(folder, normal(5, 400))


CASES: dict[str, tuple[Callable[[Path], Path], Feeds]] = {
    "matmul": (small, {"x": normal(3, 5)}),
    "external weights": (lambda path: models.external(small(path), path / "ext"), {"x": normal(3, 5)}),
    "convolution": (models.convolution, {"x": normal(2, 3, 8, 8)}),
    "subgraph": (models.branching, {"x": normal(2, 1024), "yes": np.array(1, np.float32)}),
    "strings": (models.strings, {"x": np.array([["a\0b"], ["ü"]], object)}),
    "float16": (models.float16, {"x": normal(2, 3).astype(np.float16)}),
    "bfloat16": (models.bfloat16, {"x": np.array([[16256, 0, 1]], np.uint16)}),
    "fixed batch": (lambda path: models.fixed_batch(path, 4), {"x": normal(4, 3)}),
    "default for an input": (models.optional_input, {"x": normal(2, 3)}),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_second_start_reuses_and_answers_the_same(tmp_path: Path, case: str) -> None:
    build, feeds = CASES[case]
    path = build(tmp_path)
    shared = frozenset(name for name, array in feeds.items() if array.ndim == 0)
    _, plain = await start(path, RuntimeSettings(provider="cpu"), feeds, shared=shared)
    infos = []
    for _ in range(2):
        info, answer = await start(path, cached(tmp_path), feeds, shared=shared)
        infos.append(info)
        assert info.notes == ()
        assert answer.keys() == plain.keys()
        for name, array in plain.items():
            np.testing.assert_array_equal(answer[name], array)
    assert [info.cache for info in infos] == ["built", "reused"]
    first, second = infos
    assert (second.inputs, second.outputs, second.sha256) == (first.inputs, first.outputs, first.sha256)
    assert second.load_s > 0
    assert sum(second.nodes_by_provider.values()) > 0


async def test_weights_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    await start(small(tmp_path), cached(tmp_path))
    (entry,) = entries(tmp_path)
    assert {file.name for file in entry.iterdir()} == {"entry.json", "model.onnx", "weights.bin"}


async def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    path = small(tmp_path / "models")
    info, _ = await start(path, RuntimeSettings(provider="cpu"))
    assert info.cache == "off"
    assert files_below(tmp_path) == [path]


async def test_a_graph_that_is_not_optimised_is_not_kept(tmp_path: Path) -> None:
    info, _ = await start(small(tmp_path), cached(tmp_path, graph_optimization="off"))
    assert info.cache == "off"
    assert not (tmp_path / "cache").exists()


async def test_whatever_changes_the_graph_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path)
    assert (await start(path, cached(tmp_path)))[0].cache == "built"
    assert (await start(path, cached(tmp_path, graph_optimization="basic")))[0].cache == "built"
    assert (await start(path, cached(tmp_path, intra_op_threads=2)))[0].cache == "reused"
    models.matmul(tmp_path, np.ones((5, 400)))
    assert (await start(path, cached(tmp_path)))[0].cache == "built"
    monkeypatch.setattr(hardware, "cpu", lambda: "another machine on the same volume")
    assert (await start(path, cached(tmp_path)))[0].cache == "built"
    assert len(entries(tmp_path)) == 4


async def test_other_external_weights_are_another_entry(tmp_path: Path) -> None:
    feeds: Feeds = {"x": normal(1, 5)}
    path = models.external(models.matmul(tmp_path, np.zeros((5, 400))), tmp_path / "ext")
    await start(path, cached(tmp_path), feeds)
    models.external(models.matmul(tmp_path, np.ones((5, 400))), tmp_path / "ext")
    info, answer = await start(path, cached(tmp_path), feeds)
    assert info.cache == "built"
    np.testing.assert_allclose(answer["y"], np.full((1, 400), feeds["x"].sum()), rtol=1e-5)


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "entry.json"])
@pytest.mark.parametrize("how", ["cut", "changed"])
async def test_a_damaged_entry_is_made_again_and_said(tmp_path: Path, name: str, how: str) -> None:
    path, feeds = small(tmp_path), {"x": normal(2, 5)}
    _, right = await start(path, cached(tmp_path), feeds)
    file = entries(tmp_path)[0] / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if how == "cut" else content[:-9] + bytes(9))
    info, answer = await start(path, cached(tmp_path), feeds)
    assert info.cache == "built"
    assert "dropped and is made again" in info.notes[0]
    np.testing.assert_array_equal(answer["y"], right["y"])
    assert (await start(path, cached(tmp_path)))[0].cache == "reused"


async def test_an_unusable_folder_costs_only_the_cache_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    info, answer = await start(small(tmp_path), cached(tmp_path), {"x": normal(2, 5)})
    assert info.cache == "failed"
    assert "the cache is not used: " in info.notes[0]
    assert answer["y"].shape == (2, 400)


async def test_a_disk_that_is_full_costs_only_the_cache_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimised file cannot be written: the native library itself fails, in the middle of the load."""
    staging = tmp_path / "full"

    class Full:
        def __enter__(self) -> Path:
            return staging  # never made

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("inferq_worker.runtime.cache.DiskCache.staging", lambda *_: Full())
    info, answer = await start(small(tmp_path), cached(tmp_path), {"x": normal(2, 5)})
    assert info.cache == "failed"
    assert "the cache is not written: " in info.notes[0]
    assert answer["y"].shape == (2, 400)


async def test_a_model_over_the_limit_is_served_without(tmp_path: Path) -> None:
    path = models.matmul(tmp_path, normal(600, 600))
    info, _ = await start(path, cached(tmp_path, cache_limit_bytes=2**20), {"x": normal(1, 600)})
    assert info.cache == "failed"
    assert "cache_limit_bytes is 1048576" in info.notes[0]


async def test_a_model_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    path = models.write(
        tmp_path / "m.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", TensorProto.BFLOAT16, ["n", 3])],
        [("y", TensorProto.BFLOAT16, ["n", 3])],
    )
    with pytest.raises(ModelRefused, match="no kernel for Relu"):
        await start(path, cached(tmp_path))
    assert entries(tmp_path) == []


async def test_a_model_replaced_during_the_load_is_not_kept_under_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferq_worker.runtime.onnxfile.Identity.still_holds", lambda _: False)
    info, _ = await start(small(tmp_path), cached(tmp_path))
    assert info.cache == "off"
    assert entries(tmp_path) == []


@pytest.mark.skipif(hardware.driver_present(), reason="this machine has a GPU; the fallback cannot be seen")
async def test_what_the_cpu_made_is_never_kept_as_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "driver_present", lambda: True)
    monkeypatch.setattr(hardware, "gpu", lambda _: "a GPU")
    info, _ = await start(small(tmp_path), cached(tmp_path, provider="cuda"))
    assert (info.provider, info.cache) == ("CPUExecutionProvider", "off")
    assert entries(tmp_path) == []


async def test_models_opened_at_a_time_share_an_entry(tmp_path: Path) -> None:
    path = small(tmp_path)
    feeds: Feeds = {"x": normal(2, 5)}
    started = await asyncio.gather(*(start(path, cached(tmp_path), feeds) for _ in range(4)))
    assert {info.cache for info, _ in started} <= {"built", "reused"}
    for _, answer in started:
        np.testing.assert_array_equal(answer["y"], started[0][1]["y"])
    assert len(entries(tmp_path)) == 1


def test_workers_that_start_at_the_same_time_all_serve(tmp_path: Path) -> None:
    path = small(tmp_path)
    code = (
        "import asyncio, pathlib, sys\n"
        "from inferq_worker.models.repository import ModelFile\n"
        "from inferq_worker.runtime import RuntimeSettings, open_session\n"
        "async def main():\n"
        "    sys.stdin.read(1)\n"
        f"    s = await open_session(ModelFile('m', '1', pathlib.Path({str(path)!r})),"
        f"        RuntimeSettings(provider='cpu', cache_dir=pathlib.Path({str(tmp_path / 'cache')!r})))\n"
        "    await s.warm_up([1])\n"
        "    print(s.info.cache, *s.info.notes)\n"
        "    await s.close()\n"
        "asyncio.run(main())\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go")
        worker.stdin.flush()
    said = {worker.communicate(timeout=50)[0].strip() for worker in workers}
    assert said <= {"built", "reused"}
    assert len(entries(tmp_path)) == 1
