"""Everything here needs a GPU. Without a driver it is skipped; with one, a GPU that does not work is a failure."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import RuntimeSettings, open_session
from inferq_worker.runtime.hardware import driver_present
from inferq_worker.runtime.session import OrtSession

Open = Callable[..., Awaitable[OrtSession]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if driver_present():
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason="no GPU: the NVIDIA driver (libcuda.so.1) does not load"))


def settings(provider: str = "cuda", **values: Any) -> RuntimeSettings:
    """A GPU that must be there, or the CPU."""
    return RuntimeSettings.model_validate({"provider": provider, "provider_policy": "require", **values})


@pytest.fixture(name="open_model")
async def _open_model() -> AsyncIterator[Open]:
    """Opens sessions and closes them after the test."""
    opened: list[OrtSession] = []

    async def open_model(
        path: Path, provider: str = "cuda", *, max_rows: int = 32, batch: str = "probe", **values: Any
    ) -> OrtSession:
        model = ModelFile(path.stem, "1", path, batch=batch)  # type: ignore[arg-type]  # one of its literals
        opened.append(await open_session(model, settings(provider, **values), max_rows=max_rows))
        return opened[-1]

    yield open_model
    for each in opened:
        await each.close()
