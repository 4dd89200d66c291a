"""Reads and writes .npz archives row by row, where numpy itself would hold whole arrays.

An .npz is a zip of .npy files; each is a short header and then the rows. Never reads pickled objects.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.lib import format as npy

from inferq.records import InputError, Reading, Record, to_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

__all__ = ["FAILED_NAMES", "INDEX_NAME", "NpzWriter", "npz_records", "npz_rows"]

INDEX_NAME: Final = "job_index"
"""Array of a written archive that says which job each row belongs to."""
FAILED_NAMES: Final = ("failed_index", "failed_id", "failed_code", "failed_message")
"""Arrays of a written archive that say which jobs failed and why; only there if one did."""
_MESSAGE_CHARACTERS: Final = 300
"""An array of texts takes the room of its longest for each."""
_CHUNK_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class _Rows:
    """One array of an archive, open at its first unread row."""

    name: str
    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def take(self, rows: int) -> np.ndarray[Any, Any]:
        size = rows * math.prod(self.shape[1:]) * self.dtype.itemsize
        data = self.file.read(size)
        if len(data) != size:
            raise InputError(f"array {self.name!r} ends early; the archive is damaged, write it again")
        return np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])


def npz_rows(path: Path) -> int:
    """The number of rows that all arrays of the archive share.

    Raises:
        InputError: no archive of plain arrays, or they differ in length.
    """
    with _open(path) as arrays:
        return arrays[0].shape[0]


def npz_records(path: Path, rows_per_job: int, reading: Reading) -> Iterator[Record]:
    """Yield jobs of `rows_per_job` consecutive rows each; the last may have fewer.

    Raises:
        InputError: as `npz_rows`.
    """
    with _open(path) as arrays:
        total = arrays[0].shape[0]
        for start in range(0, total, rows_per_job):
            rows = min(rows_per_job, total - start)
            place = f"row {start}" if rows == 1 else f"rows {start} to {start + rows - 1}"
            try:
                inputs = {array.name: to_dtype(array.take(rows), reading.dtypes.get(array.name)) for array in arrays}
            except InputError as error:
                raise InputError(f"{path}, {place}: {error}") from error
            reading.seen.names.update(inputs)
            yield Record(inputs, place=place)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[list[_Rows]]:
    with contextlib.ExitStack() as files:
        try:
            archive = files.enter_context(zipfile.ZipFile(path))
            arrays = [_rows(name, files.enter_context(archive.open(name))) for name in archive.namelist()]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: no .npz of plain arrays ({error}); write it with numpy.savez") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        lengths = {array.name: array.shape[0] for array in arrays}
        if not arrays or len(set(lengths.values())) != 1:
            raise InputError(
                f"{path}: all arrays must have the same number of rows (axis 0), found {lengths or 'none'}"
            )
        yield arrays


def _rows(member: str, file: IO[bytes]) -> _Rows:
    name = member.removesuffix(".npy")
    version = npy.read_magic(file)
    reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, column_order, dtype = reader(file)
    if dtype.hasobject:
        raise InputError(f"array {name!r} holds pickled objects, which are never read; save numbers or texts")
    if not shape:
        raise InputError(f"array {name!r} has no rows; the first axis must be the batch")
    if column_order and len(shape) > 1:
        raise InputError(f"array {name!r} is in column order; save numpy.ascontiguousarray(array)")
    return _Rows(name, file, shape, dtype)


class NpzWriter:
    """Writes answers into one archive, rows in the order of the jobs however they come; failures in arrays beside.

    Rows wait in files beside the archive until `close`, which sorts them; only row numbers stand in memory.

    Args:
        path: archive to write; appears when complete.

    Raises:
        InputError: nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        self._failures: list[int] = []
        self._failures_file: IO[bytes] | None = None
        self._files: dict[str, IO[bytes]] = {}
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._indices: list[int] = []
        self._rows: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error, what came before it is worth having; an archive of nothing is not.
            if error is None or self._indices or self._failures:
                self._write()
        finally:
            for file in self._files.values():
                file.close()
            if self._failures_file is not None:
                self._failures_file.close()
            self._folder.cleanup()

    def add(self, index: int, outputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take the outputs of one job.

        Raises:
            InputError: they differ in name, dtype or shape from those before, so one array cannot hold them.
        """
        kinds = {name: (array.dtype, array.shape[1:]) for name, array in outputs.items()}
        rows = {array.shape[:1] for array in outputs.values()}
        if not self._kinds:
            self._start(kinds)
        if kinds != self._kinds or len(rows) != 1 or () in rows:
            raise InputError(
                f"job {index}: its outputs {_described(kinds)} do not fit into one array with those before "
                f"({_described(self._kinds)}); write .jsonl instead",
            )
        for name, array in outputs.items():
            self._files[name].write(np.ascontiguousarray(array).tobytes())
        self._indices.append(index)
        self._rows.append(next(iter(rows))[0])

    def fail(self, index: int, job_id: str, code: str, message: str) -> None:
        """Take a job that has no outputs; a long message is cut."""
        if self._failures_file is None:
            self._failures_file = (Path(self._folder.name) / "failures").open("wb+")
        texts = [job_id, code, message[:_MESSAGE_CHARACTERS]]
        self._failures_file.write(json.dumps(texts).encode() + b"\n")
        self._failures.append(index)

    def _start(self, kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
        odd = [name for name, (dtype, _) in kinds.items() if dtype.hasobject]
        taken = [name for name in (INDEX_NAME, *FAILED_NAMES) if name in kinds]
        if odd or taken or not kinds:
            why = "texts" if odd else f"the name {taken[0]!r}" if taken else "there are none"
            raise InputError(f"outputs {_described(kinds)} cannot be an .npz ({why}): write .jsonl")
        self._kinds = kinds
        for number, name in enumerate(kinds):
            self._files[name] = (Path(self._folder.name) / str(number)).open("wb+")

    def _write(self) -> None:
        order = np.argsort(np.asarray(self._indices, np.int64), kind="stable")
        rows = np.asarray(self._rows, np.int64)
        starts = np.concatenate([[0], np.cumsum(rows)[:-1]]) if len(rows) else rows
        partial = Path(self._folder.name) / "archive"
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, (dtype, tail) in self._kinds.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
                    _write_header(target, dtype, (int(rows.sum()), *tail))
                    width = math.prod(tail) * dtype.itemsize
                    self._copy(self._files[name], target, starts[order] * width, rows[order] * width)
            with archive.open(f"{INDEX_NAME}.npy", "w", force_zip64=True) as target:
                index = np.repeat(np.asarray(self._indices, np.int64)[order], rows[order])
                _write_header(target, index.dtype, index.shape)
                target.write(index.tobytes())
            self._write_failures(archive)
        partial.replace(self._path)

    def _write_failures(self, archive: zipfile.ZipFile) -> None:
        if self._failures_file is None:
            return
        self._failures_file.seek(0)
        texts = list(zip(*map(json.loads, self._failures_file), strict=True))
        order = np.argsort(np.asarray(self._failures, np.int64), kind="stable")
        columns = [np.asarray(self._failures, np.int64), *(np.asarray(column) for column in texts)]
        for name, column in zip(FAILED_NAMES, columns, strict=True):
            # Compressed, unlike the outputs: most failures say the same.
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as target:
                npy.write_array(target, column[order], allow_pickle=False)

    def _copy(
        self,
        source: IO[bytes],
        target: IO[bytes],
        offsets: np.ndarray[Any, np.dtype[np.int64]],
        sizes: np.ndarray[Any, np.dtype[np.int64]],
    ) -> None:
        source.flush()
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            source.seek(offset)
            left = size
            while left:
                data = source.read(min(left, _CHUNK_BYTES))
                target.write(data)
                left -= len(data)


def _write_header(target: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_2_0(target, header)


def _described(kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> str:
    return ", ".join(f"{name}: {dtype.name} (n, {', '.join(map(str, tail))})" for name, (dtype, tail) in kinds.items())
