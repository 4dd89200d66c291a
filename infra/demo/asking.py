"""Asks for every file with the client library: in bundles, as a pipeline does, and one by one, as services do."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from infra.demo import inputs
from infra.demo.inputs import Labels
from infra.demo.model import MODEL, PROJECT_FOLDER
from infra.demo.report import Progress, Row
from infra.demo.samples import Sample

from inferq import Answer, Client, InferqError

LOG_FOLDER = PROJECT_FOLDER / ".run" / "demo"
_SERVICES = 8


@dataclass(slots=True)
class Asked:
    """What came of it: the answers by the way they were asked for, and what went wrong."""

    in_bundles: list[Row] = field(default_factory=list)
    one_by_one: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def rows(self) -> list[Row]:
        """All answers, known types first."""
        return sorted(
            [*self.in_bundles, *self.one_by_one], key=lambda row: (row.sample.expected is None, row.sample.name)
        )


def feed(*contents: bytes) -> dict[str, npt.NDArray[Any]]:
    """Build the model's inputs for these files, one row a file."""
    return {inputs.INPUT: np.concatenate([inputs.features(content) for content in contents])}


def save_inputs(files: Sequence[Sample]) -> Path:
    """Write all inputs to one file, as `inferq submit` reads them."""
    path = LOG_FOLDER / "files.npz"
    np.savez_compressed(path, **feed(*(file.content for file in files)))  # type: ignore[arg-type] # numpy's stub takes the names for its own option
    return path


async def ask_all(client: Client, files: Sequence[Sample], labels: Labels) -> Asked:
    """Ask for the repository's files in bundles and for the generated ones one by one, all at the same time."""
    asking = _Asking(client, labels, Progress(len(files)))
    started_s = time.monotonic()
    generated = iter([file for file in files if file.generated])
    async with asyncio.TaskGroup() as group:
        group.create_task(asking.in_bundles([file for file in files if not file.generated]))
        for _ in range(_SERVICES):
            group.create_task(asking.one_by_one(generated))
    asking.asked.took_s = time.monotonic() - started_s
    return asking.asked


class _Asking:
    def __init__(self, client: Client, labels: Labels, progress: Progress) -> None:
        self._client = client
        self._labels = labels
        self._progress = progress
        self.asked = Asked()

    async def in_bundles(self, files: Sequence[Sample]) -> None:
        """The bulk lane: no deadline, up to 64 jobs a message, answers in the order in which they come."""
        try:
            async for answer in self._client.infer_many(MODEL, (feed(file.content) for file in files)):
                file = files[answer.index or 0]
                if answer.error is None:
                    self.asked.in_bundles.append(self._row(file, answer))
                else:
                    self.asked.problems.append(f"{file.name}: {answer.error}")
                self._progress.advance()
        except InferqError as error:
            self.asked.problems.append(str(error))

    async def one_by_one(self, files: Iterator[Sample]) -> None:
        """One service on the interactive lane: asks, waits, asks again; shares the files with the other services."""
        for file in files:
            try:
                answer = await self._client.infer(MODEL, feed(file.content))
                self.asked.one_by_one.append(self._row(file, answer))
            except InferqError as error:
                self.asked.problems.append(f"{file.name}: {error}")
            self._progress.advance()

    def _row(self, file: Sample, answer: Answer) -> Row:
        return Row(file, self._labels.verdict(answer.outputs[inputs.OUTPUT][0]), answer.result)
