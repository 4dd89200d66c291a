"""TensorRT builds one engine for all sizes, keeps it, and answers as the CPU does."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.cases import BUCKETS, CASES, MAX_ROWS, assert_close, only
from tests.gpu.conftest import Open

from inferq_worker.runtime import tensorrt


def _installed() -> bool:
    tensorrt.preload()
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not _installed(), reason="TensorRT 10 (libnvinfer.so.10) is not installed"),
    pytest.mark.timeout(200),
]


async def test_one_engine_serves_every_size_and_the_second_start(
    open_model: Open, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = CASES["convolution"]
    path = case.build(tmp_path)
    cpu = await open_model(path, "cpu", max_rows=MAX_ROWS)
    rng = np.random.default_rng(0)
    loads = []
    for expected in ("built", "reused"):
        session = await open_model(path, "tensorrt", max_rows=MAX_ROWS, cache_dir=tmp_path / "cache")
        assert (session.info.provider, session.info.cache) == ("TensorrtExecutionProvider", expected)
        loads.append(round(session.info.load_s, 3))
        kept = sorted((tmp_path / "cache").rglob("*.engine"))
        assert len(kept) == 1
        stamps = [file.stat().st_mtime_ns for file in kept]
        for rows in (*BUCKETS, 3, 31):
            feeds = case.make(rng, rows)
            assert_close(only(await session.run([feeds])), only(await cpu.run([feeds])), case.tolerance)
        assert [file.stat().st_mtime_ns for file in sorted((tmp_path / "cache").rglob("*.engine"))] == stamps
    record_property("load_s", loads)
    assert loads[1] < loads[0]
