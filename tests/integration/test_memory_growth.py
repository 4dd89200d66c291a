"""Memory over thousands of runs of random sizes and shapes: decode, real session, answers. No broker.

The short sibling of `make bench-memory`, which drives a whole worker.
"""

from pathlib import Path

import numpy as np
import pytest
from tests.bench.soak_memory import jobs_of, write_model

from inferq_schemas import Job, Result, Tensor, decode_jobs, encode_bundle, encode_result
from inferq_worker.models import ModelFile
from inferq_worker.observe.memory import resident
from inferq_worker.observe.memory_watch import give_free_memory_back
from inferq_worker.runtime import RowError, RuntimeSettings, Session, open_session

JOBS_A_BATCH, BATCHES = 8, 800
MOST_GROWTH_RATIO = 0.02


def anonymous_bytes() -> int:
    """Of this process, without what is only free and not yet given back."""
    give_free_memory_back()
    memory = resident()
    if memory is None:
        pytest.skip("no /proc here to read memory from")
    return memory.anonymous_bytes


async def answer(session: Session, batches: int, seed: int) -> int:
    """Answer batches of random jobs; returns how many jobs were answered well."""
    inputs = jobs_of(batches * JOBS_A_BATCH, seed)
    good = 0
    for batch in range(batches):
        bundle = [
            Job(id=f"{batch}-{n}", model="soak", inputs={"x": Tensor.from_numpy(next(inputs)["x"])})
            for n in range(JOBS_A_BATCH)
        ]
        jobs = [job for job in decode_jobs(encode_bundle(bundle)) if isinstance(job, Job)]
        report = await session.run([{name: one.to_numpy() for name, one in job.inputs.items()} for job in jobs])
        for job, outputs in zip(jobs, report.answers, strict=True):
            if not isinstance(outputs, RowError):
                tensors = {name: Tensor.from_numpy(np.ascontiguousarray(y)) for name, y in outputs.items()}
                good += len(encode_result(Result(job.id, "ok", outputs=tensors))) > 0
    return good


async def test_memory_does_not_grow_with_work(tmp_path: Path) -> None:
    model = ModelFile("soak", "1", write_model(tmp_path))
    session = await open_session(model, RuntimeSettings(provider="cpu"), max_rows=128)
    await session.warm_up([128])
    good = await answer(session, BATCHES, seed=1)
    half = anonymous_bytes()
    good += await answer(session, BATCHES, seed=2)
    grown = anonymous_bytes() - half
    await session.close()
    assert good > 0.97 * 2 * BATCHES * JOBS_A_BATCH
    assert grown < MOST_GROWTH_RATIO * half, f"{grown} bytes more after the second half, on top of {half}"
