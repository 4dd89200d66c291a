"""Proves by running that the rows of a batch do not depend on each other.

A dynamic first axis is no proof: it may be time, or the graph may average over it. So made-up rows are run together,
in another order, among copies of themselves and alone, and must give the same answers. Pure: the run is a parameter,
the numbers are seeded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from inferq_schemas.tensor import DTYPES
from inferq_worker.runtime.collate import RowsMixed
from inferq_worker.runtime.interface import Array, Feeds, RunFailed, TensorSpec

Run = Callable[[Feeds], Feeds]
"""Runs feeds of any number of rows and returns as many rows; raises `RunFailed`."""

PROBE_ROWS = 4
# What to try for dynamic inner axes: small, the strides of convolutional nets, common image sizes.
_SIZES = (8, 16, 32, 1, 2, 64, 224)
# Largest difference, relative to the largest answer, that counts as agreement in batches of one size; TF32 on a GPU
# keeps ten bits of mantissa.
_TOLERANCE = {"float64": 1e-6, "float32": 2e-3, "float16": 2e-2, "bfloat16": 5e-2}
# Times the tolerance, up to a most, for a batch of another size, which may pick another kernel. A normalisation over
# nearly equal values, as made-up rows are, amplifies what that changes: 1e-2 was seen with float32 on a CPU.
_OTHER_SIZE_SLACK = 25
_OTHER_SIZE_MOST = 0.1


class Unprobeable(Exception):  # noqa: N818 - says what happened
    """No made-up input that can tell rows apart suits the model."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of one row or batch, run in two ways.

    Attributes:
        what: how the rows were run the second time.
        output: name of the output.
        difference: largest, relative to the largest expected value; infinite if shape, NaN or infinity differ.
        tolerance: the largest difference that counts as agreement.
        meaning: what a difference says of the model.
    """

    what: str
    output: str
    difference: float
    tolerance: float
    meaning: str

    @property
    def agrees(self) -> bool:
        """Whether the answers are the same within tolerance."""
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class _Way:
    """How rows are run the second time; `slack` is a factor of the tolerance."""

    what: str
    meaning: str
    slack: int = 1


_AGAIN = _Way("the same batch again", "the same rows give other answers when run again")
_REVERSED = _Way("the batch in reverse order", "the answers depend on the order of the rows")
_AMONG_COPIES = _Way("each row among copies of itself", "a row's answer depends on the other rows of its batch")
_ALONE = _Way("each row alone", "a row's answer depends on how many rows its batch has", slack=_OTHER_SIZE_SLACK)


@dataclass(frozen=True, slots=True)
class _Fill:
    """How to make values up: integers in `low..high` inclusive (embeddings take small ones), floats around `centre`."""

    low: int
    high: int
    centre: float


_FILLS = (_Fill(0, 1, 0.0), _Fill(1, 2, 2.0), _Fill(1, 1, 0.0), _Fill(0, 0, 0.0))


@dataclass(frozen=True, slots=True)
class Probe:
    """Makes up inputs for a model and compares its answers.

    Args:
        run: the model.
        inputs: what to make up; a shape of () is a shared scalar.
        outputs: whose dtypes choose the tolerance.
        keep_first_axes: make an axis 0 that has a size of that size, not as long as there are rows.
    """

    run: Run
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    keep_first_axes: bool = False

    def find_sample(self, rows: int) -> Feeds:
        """Find made-up feeds of `rows` rows that the model accepts.

        Raises:
            RowsMixed: the model accepts one row but never `rows`, or answers with another number of rows.
            Unprobeable: the model accepts nothing that was tried; carries its last complaint.
        """
        complaint = "nothing was tried"
        accepts_one = False
        for feeds in self._candidates(rows):
            try:
                self.run(feeds)
            except RowsMixed:
                raise
            except RunFailed as error:
                complaint = str(error)
                accepts_one = accepts_one or self._accepts(take(feeds, [0], self.inputs))
            else:
                return feeds
        if accepts_one and rows > 1:
            raise RowsMixed(f"it runs one row but not {rows} together ({complaint})")
        raise Unprobeable(f"none of the made-up inputs suits it ({complaint})")

    def prove(self, sample: Feeds) -> None:
        """Compare rows together, again, reversed, among copies of themselves and alone.

        Raises:
            RowsMixed: an answer depends on the other rows, on their order, or on chance.
            Unprobeable: all rows of the sample are the same, which would prove nothing.
        """
        for found in self.compare(sample):
            if not found.agrees:
                raise RowsMixed(
                    f"{found.meaning} (output {found.output!r} differs by {found.difference:.2g} of its largest value)"
                )

    def compare(self, sample: Feeds) -> Iterator[Comparison]:
        """What `prove` judges by, one comparison after the other; none for a single row, which has no company.

        Raises:
            RunFailed: the model refuses rows alone or in another order that it takes together.
            Unprobeable: as for `prove`.
        """
        rows = row_count(sample, self.inputs)
        if rows == 1:
            return
        if not _tells_rows_apart(sample, self.inputs):
            raise Unprobeable("only rows that are all the same suit it, which prove nothing")
        together = self.run(sample)
        yield from self._compare(together, self.run(sample), _AGAIN)
        order = list(range(rows))[::-1]
        turned = {name: array[order] for name, array in together.items()}
        yield from self._compare(turned, self.run(take(sample, order, self.inputs)), _REVERSED)
        for row in order:
            part = {name: array[row : row + 1] for name, array in together.items()}
            if row < PROBE_ROWS:
                copies = self.run(take(sample, [row] * rows, self.inputs))
                yield from self._compare(part, {name: array[:1] for name, array in copies.items()}, _AMONG_COPIES)
            yield from self._compare(part, self.run(take(sample, [row], self.inputs)), _ALONE)

    def _accepts(self, feeds: Feeds) -> bool:
        try:
            self.run(feeds)
        except RunFailed:
            return False
        return True

    def _candidates(self, rows: int) -> Iterator[Feeds]:
        has_dynamic = any(None in spec.shape[1:] for spec in self.inputs)
        for size, fill in product(_SIZES if has_dynamic else (1,), _FILLS):
            rng = np.random.default_rng(0)
            yield {spec.name: _make_up(spec, self._length(spec, rows), size, fill, rng) for spec in self.inputs}

    def _length(self, spec: TensorSpec, rows: int) -> int:
        fixed = spec.shape[0] if spec.shape and self.keep_first_axes else None
        return rows if fixed is None else fixed

    def _compare(self, expected: Feeds, actual: Feeds, way: _Way) -> Iterator[Comparison]:
        for spec in self.outputs:
            difference = _difference(expected[spec.name], actual[spec.name], spec.dtype)
            tolerance = _TOLERANCE.get(spec.dtype, 0.0)
            most = max(tolerance, min(way.slack * tolerance, _OTHER_SIZE_MOST))
            yield Comparison(way.what, spec.name, difference, most, way.meaning)


def row_count(feeds: Feeds, inputs: Sequence[TensorSpec]) -> int:
    """Rows of made-up feeds: axis 0 of any input that is not a scalar."""
    return next(len(feeds[spec.name]) for spec in inputs if spec.shape)


def take(feeds: Feeds, rows: Sequence[int], inputs: Sequence[TensorSpec]) -> Feeds:
    """A copy of the given rows, in that order and as often as named; scalars stay."""
    return {spec.name: feeds[spec.name][list(rows)] if spec.shape else feeds[spec.name] for spec in inputs}


def _make_up(spec: TensorSpec, rows: int, size: int, fill: _Fill, rng: np.random.Generator) -> Array:
    shape = (rows, *(size if axis is None else axis for axis in spec.shape[1:])) if spec.shape else ()
    if spec.dtype == "string":
        words = np.array([f"row {number}" for number in range(max(fill.high, 1) + 1)], dtype=object)
        return np.asarray(words[rng.integers(0, len(words), shape)], dtype=object).reshape(shape)
    if "float" in spec.dtype:
        values = np.asarray(fill.centre + rng.uniform(-1.0, 1.0, shape), dtype=np.float32)
        return _to_bfloat16(values) if spec.dtype == "bfloat16" else values.astype(DTYPES[spec.dtype].storage)
    whole = rng.integers(fill.low, fill.high, shape, endpoint=True)
    if shape and fill.low < fill.high:
        _tell_apart(whole, fill)
    return np.asarray(whole).astype(DTYPES[spec.dtype].storage)


def _tell_apart(whole: Array, fill: _Fill) -> None:
    """With one or two small integers in a row, chance alone may make all rows the same."""
    if whole.size:
        whole.reshape(whole.shape[0], -1)[:, 0] = fill.low + np.arange(whole.shape[0]) % 2


def _to_bfloat16(values: Array) -> Array:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _tells_rows_apart(feeds: Feeds, inputs: Sequence[TensorSpec]) -> bool:
    return any(spec.shape and bool((feeds[spec.name] != feeds[spec.name][:1]).any()) for spec in inputs)


def _difference(expected: Array, actual: Array, dtype: str) -> float:
    """Largest difference relative to the largest finite expected value; infinite if shape, NaN or infinity differ."""
    if expected.shape != actual.shape:
        return float("inf")
    if "float" not in dtype:
        return 0.0 if np.array_equal(expected, actual) else float("inf")
    left, right = (_widen(array, dtype) for array in (expected, actual))
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)) or not np.array_equal(
        left[~finite], right[~finite], equal_nan=True
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    worst = float(np.abs(left[finite] - right[finite]).max())
    scale = float(np.abs(left[finite]).max())
    return worst / scale if scale else (0.0 if worst == 0 else float("inf"))


def _widen(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
