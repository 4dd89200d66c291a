"""Items to feeds and back: checks each item, packs rows into native runs, gathers them, hands the answers out again.

Copies: none for a run of one contiguous item that needs no padding; otherwise one gather into a buffer that lives as
long as the collator.
Answers are views into the outputs of the run. Knows nothing of threads or sessions; one collator serves one thread.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inferq_schemas.tensor import DTYPES
from inferq_worker.runtime.interface import Array, Feeds, RowError, RunFailed, SessionInfo, TensorSpec


class RowsMixed(RunFailed):
    """The model does not answer row by row, so its rows cannot be shared out to items."""

    def __init__(self, message: str) -> None:
        super().__init__("inference_failed", message)


@dataclass(slots=True)
class Piece:
    """Rows `start <= row < stop` of item number `item`."""

    item: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows; >= 1."""
        return self.stop - self.start


def check_all(items: Sequence[Feeds], info: SessionInfo) -> list[int | RowError]:
    """`check` of each item. One that is shaped like another that fits is not gone through again."""
    checked: list[int | RowError] = []
    fitting: Feeds | None = None
    for item in items:
        rows = _rows_if_alike(item, fitting) if fitting is not None and info.batchable else None
        if rows is None:
            found = check(item, info)
            if isinstance(found, int) and all(array.size and not array.dtype.hasobject for array in item.values()):
                fitting = item
            checked.append(found)
        else:
            checked.append(rows)
    return checked


def _rows_if_alike(item: Feeds, other: Feeds) -> int | None:
    """Rows of an item whose arrays have the types and inner shapes of the other's; None if they differ."""
    if len(item) != len(other):
        return None
    rows: int | None = None
    for name, like in other.items():
        array = item.get(name)
        if array is None or array.dtype != like.dtype or array.ndim != like.ndim or array.shape[1:] != like.shape[1:]:
            return None
        if like.ndim:
            if rows not in (None, array.shape[0]):
                return None
            rows = array.shape[0]
    return rows or None  # none at all is for `check` to explain


def check(feeds: Feeds, info: SessionInfo) -> int | RowError:
    """Count the rows of an item, or say why it does not fit the model.

    The border has checked all this before; here it is the last door before native code, which reads byte strings out
    of bounds and big-endian numbers as garbage without a word.
    """
    if feeds.keys() != {spec.name for spec in info.inputs}:
        wanted = ", ".join(spec.name for spec in info.inputs)
        return RowError("invalid_input", f"the inputs are {sorted(feeds)}; the model wants {wanted}")
    rows: int | None = None
    for spec in info.inputs:
        array = feeds[spec.name]
        if problem := _storage_problem(array, spec) or _shape_problem(array, spec):
            return RowError("invalid_input", f"input {spec.name!r} {problem}")
        if spec.name in info.shared:
            continue
        if rows not in (None, array.shape[0]):
            return RowError("invalid_input", f"input {spec.name!r} has {array.shape[0]} rows, another has {rows}")
        rows = array.shape[0]
    weightless = all(feeds[spec.name].size == 0 for spec in info.inputs if spec.name not in info.shared)
    return _row_count(rows or 0, info, weightless=weightless)


def _row_count(rows: int, info: SessionInfo, *, weightless: bool) -> int | RowError:
    if rows < 1:
        return RowError("invalid_input", "the inputs have no rows")
    if weightless and rows > info.max_rows:
        # Nothing but memory bounds the rows of other items; these would be cut into runs without end.
        return RowError("too_large", f"{rows} rows without elements; at most {info.max_rows} of these in one run")
    if info.batchable:
        return rows
    if info.fixed_rows is not None and rows != info.fixed_rows:
        return RowError("invalid_input", f"{rows} rows; the model takes exactly {info.fixed_rows} at a time")
    if rows > info.max_rows:
        return RowError("too_large", f"{rows} rows in one run; the model's limit is {info.max_rows}")
    return rows


def _storage_problem(array: Array, spec: TensorSpec) -> str:
    if spec.dtype == "string":
        if (array.dtype.kind == "U" and array.dtype.isnative) or (
            array.dtype.kind == "O" and all(isinstance(text, str) for text in array.flat)
        ):
            return ""
        return f"is not text (an array of {array.dtype}); the model wants strings"
    if array.dtype == DTYPES[spec.dtype].storage:  # byte order included
        return ""
    return f"has the dtype {array.dtype.str if not array.dtype.isnative else array.dtype}; the model wants {spec.dtype}"


def _shape_problem(array: Array, spec: TensorSpec) -> str:
    wanted = (None, *spec.shape[1:]) if spec.shape else ()
    fits = array.ndim == len(wanted) and all(
        want in (None, size) for want, size in zip(wanted, array.shape, strict=True)
    )
    if fits:
        return ""
    readable = ", ".join("any" if size is None else str(size) for size in wanted)
    return f"has the shape {list(array.shape)}; the model wants [{readable}]"


def plan(
    feeds: Sequence[Feeds],
    rows: Mapping[int, int],
    info: SessionInfo,
    limit: Callable[[Hashable], int] | None = None,
) -> list[tuple[Piece, ...]]:
    """Pack items into native runs of at most so many rows as their shape allows, in order.

    Only items of the same inner shapes and shared scalars meet in a run. An item that fits is kept whole; a larger one
    is cut, its last rows sharing a run with what follows.

    Args:
        feeds: all items.
        rows: rows of each item to run, by its number; items left out are not run.
        info: limits of the model.
        limit: inner shapes (see `inner_shapes`) -> most rows of a run; None = `max_rows` for all.
    """
    if not info.batchable:
        return [(Piece(item, 0, count),) for item, count in rows.items()]
    groups: dict[object, list[int]] = {}
    for item in rows:
        groups.setdefault(_company(feeds[item], info), []).append(item)
    runs: list[tuple[Piece, ...]] = []
    for items in groups.values():
        runs += _pack(items, rows, limit(inner_shapes(feeds[items[0]], info)) if limit else info.max_rows)
    return runs


def inner_shapes(feeds: Feeds, info: SessionInfo) -> Hashable:
    """Shapes of one row, input by input, shared scalars left out: what its need of memory goes by."""
    return tuple(feeds[spec.name].shape[1:] for spec in info.inputs if spec.name not in info.shared)


def _pack(items: Iterable[int], rows: Mapping[int, int], limit: int) -> list[tuple[Piece, ...]]:
    runs: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    used = 0
    for item in items:
        if used + rows[item] <= limit:
            current.append(Piece(item, 0, rows[item]))
            used += rows[item]
            continue
        for start in range(0, rows[item], limit):
            piece = Piece(item, start, min(start + limit, rows[item]))
            if used + piece.rows > limit:
                runs.append(tuple(current))
                current, used = [], 0
            current.append(piece)
            used += piece.rows
    return [*runs, tuple(current)]


def _company(feeds: Feeds, info: SessionInfo) -> object:
    """Equal for items that may meet in one run."""
    return tuple(
        [feeds[spec.name].item() if spec.name in info.shared else feeds[spec.name].shape[1:] for spec in info.inputs]
    )


class Collator:
    """Gathers the rows of a run, in buffers that grow to the largest run seen and are reused by every later one.

    The feeds it returns are good until the next call. Not for several threads.
    """

    def __init__(self, info: SessionInfo) -> None:
        self._info = info
        self._buffers: dict[str, Array] = {}

    def gather(self, pieces: Sequence[Piece], feeds: Sequence[Feeds]) -> Feeds:
        """Build the feeds of one run, padded to the fixed batch or the next bucket by repeating the last row."""
        rows = row_sum(pieces)
        target = self._info.padded(rows)
        first = feeds[pieces[0].item]
        collated: dict[str, Array] = {}
        for spec in self._info.inputs:
            if spec.name in self._info.shared:
                collated[spec.name] = first[spec.name]
                continue
            parts = [_cut(feeds[piece.item][spec.name], piece) for piece in pieces]
            if len(parts) == 1 and target == rows and parts[0].flags.c_contiguous:
                collated[spec.name] = parts[0]
            else:
                collated[spec.name] = self._fill(spec, parts, rows, target)
        return collated

    def _fill(self, spec: TensorSpec, parts: Sequence[Array], rows: int, target: int) -> Array:
        shape = (target, *parts[0].shape[1:])
        # Strings are references; a buffer that outlives the run would keep every text of the largest batch alive.
        out = np.empty(shape, object) if spec.dtype == "string" else self._buffer(spec.name, parts[0].dtype, shape)
        np.concatenate(parts, axis=0, out=out[:rows])
        out[rows:] = out[rows - 1]
        return out

    def _buffer(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        # Bytes rather than typed rows: with dynamic inner axes one buffer serves all shapes.
        needed = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < needed:
            buffer = self._buffers[name] = np.empty(needed, np.uint8)
        return buffer[:needed].view(dtype).reshape(shape)


def _cut(array: Array, piece: Piece) -> Array:
    return array if piece.stop - piece.start == array.shape[0] else array[piece.start : piece.stop]


def row_sum(pieces: Iterable[Piece]) -> int:
    """Rows of all of them."""
    return sum([piece.stop - piece.start for piece in pieces])


def share_out(outputs: Feeds, pieces: Sequence[Piece], info: SessionInfo) -> list[Feeds]:
    """Cut the outputs of a run along axis 0, one view per piece; padding rows fall away.

    Raises:
        RowsMixed: an output does not have one row per row that went in.
    """
    if not info.batchable:
        return [outputs]
    rows = row_sum(pieces)
    computed = info.padded(rows)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != computed:
            raise RowsMixed(f"output {name!r} has the shape {list(array.shape)} for {computed} rows in")
    shared_out: list[Feeds] = []
    start = 0
    for piece in pieces:
        stop = start + piece.rows
        shared_out.append({name: array[start:stop] for name, array in outputs.items()})
        start = stop
    return shared_out


def join(parts: Sequence[Feeds]) -> Feeds | RowError:
    """Put the answers to the pieces of one item together again; a single one is handed on as it is.

    An error where they do not fit together: the inner shape of an output depends on the rows that run together.
    """
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Array] = {}
    for name in parts[0]:
        shapes = {part[name].shape[1:] for part in parts}
        if len(shapes) > 1:
            readable = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            return RowError(
                "inference_failed",
                f"the job ran in {len(parts)} parts, and output {name!r} has rows of the shapes {readable} in them: "
                "send it in smaller jobs",
            )
        whole[name] = np.concatenate([part[name] for part in parts], axis=0)
    return whole
