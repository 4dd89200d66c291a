"""From a stranger's bytes to plain values, within a bound on memory. Knows msgpack, not jobs.

The unpacker allocates an array when it reads its length, before it has seen one element: 5 KB of nested array headers
can claim gigabytes. So arrays are first taken only as long as a bundle or a shape is. A body that holds more, a long
string tensor, is surveyed before: nested no deeper than a body of ours, claiming no more than it may hold.
"""

from collections.abc import Callable
from typing import Any, Final

import msgpack

from inferq_schemas.errors import ContractError, ErrorCode, shorten
from inferq_schemas.limits import Limits

# Array of results > result > outputs > tensor > shape, and room for later versions.
MAX_DEPTH: Final = 8
_LEAST_BYTES_PER_CONTAINER: Final = 4


def unpack(body: bytes, limits: Limits) -> Any:
    """Unpack one body: maps as dicts, arrays as tuples, bin as bytes that are copied once.

    Raises:
        ContractError: `too_large` above a limit; `malformed` for everything that is not one msgpack value of nil, bool,
            numbers, str, bin, arrays and maps without repeated keys.
    """
    if len(body) > limits.body_bytes:
        raise ContractError(
            "too_large", f"body: {len(body)} bytes, at most {limits.body_bytes}; send large tensors as a ref"
        )
    try:
        return _unpack(body, limits, max_array_len=max(limits.bundle_jobs, limits.rank))
    except ContractError:
        raise
    except ValueError:
        # Damaged, or with a long array. The survey tells which, and where.
        survey(body, limits)
    try:
        return _unpack(body, limits, max_array_len=limits.items)
    except ContractError:
        raise
    except ValueError as error:
        code: ErrorCode = "too_large" if "exceeds max_" in str(error) else "malformed"
        raise ContractError(code, f"body: cannot be unpacked ({_reason(error)})") from None


def _reason(error: ValueError) -> str:
    # A UnicodeDecodeError prints the bytes it failed on.
    return "a str that is not UTF-8" if isinstance(error, UnicodeDecodeError) else shorten(str(error), 100)


def _unpack(body: bytes, limits: Limits, *, max_array_len: int) -> Any:
    on_map, on_array = _counting_hooks(len(body), limits)
    return msgpack.unpackb(
        body,
        raw=False,
        use_list=False,
        strict_map_key=True,
        object_pairs_hook=on_map,
        list_hook=on_array,
        ext_hook=_refuse_ext,
        max_str_len=limits.body_bytes,
        max_bin_len=limits.body_bytes,
        max_array_len=max_array_len,
        # Twice what the schema takes, so that one job with too many inputs is refused and not the bundle around it.
        max_map_len=2 * max(limits.inputs, limits.params, 32),
        max_ext_len=0,
    )


def _counting_hooks(
    body_bytes: int, limits: Limits
) -> tuple[Callable[[list[tuple[str, Any]]], dict[str, Any]], Callable[[tuple[Any, ...]], tuple[Any, ...]]]:
    """Hooks that share a budget of containers; 1 MB of empty maps would otherwise become 75 MB.

    A container of a real body comes with a key, so a small body has a small budget.
    """
    containers_left = min(limits.containers, 16 + body_bytes // _LEAST_BYTES_PER_CONTAINER)
    items_left = limits.items

    # Both run for every container of every body: the few lines they share are not worth a call.
    def on_map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal containers_left, items_left
        containers_left -= 1
        items_left -= len(pairs)
        if containers_left < 0 or items_left < 0:
            raise _too_many()
        unpacked = dict(pairs)
        if len(unpacked) != len(pairs):
            raise ContractError("malformed", "body: a map has the same key twice")
        return unpacked

    def on_array(items: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal containers_left, items_left
        containers_left -= 1
        items_left -= len(items)
        if containers_left < 0 or items_left < 0:
            raise _too_many()
        return items

    return on_map, on_array


def _too_many() -> ContractError:
    return ContractError("too_large", "body: too many maps, arrays or entries; split the bundle")


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ContractError("malformed", f"body: extension type {code} of {len(data)} bytes; the contract has none")


_NUMBER_BYTES: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def _whole_length(head: int) -> int:
    if head < 0x80 or head >= 0xE0 or head in {0xC0, 0xC2, 0xC3}:
        return 1
    return 1 + (head & 0x1F) if 0xA0 <= head < 0xC0 else 1 + _NUMBER_BYTES.get(head, -1)


# First byte -> bytes of the whole value, where the first byte alone tells; otherwise 0.
_WHOLE_LENGTHS: Final = bytes(map(_whole_length, range(256)))
# First byte -> width of the big-endian length that follows.
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# First byte -> width of the count that follows, and values per entry.
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def survey(body: bytes, limits: Limits) -> None:
    """Walk over the structure of a body without building it.

    Raises:
        ContractError: `malformed` with the offset of the byte where it breaks; `too_large` as soon as arrays and maps
            claim more entries than `limits.items`, so that the walk is short however long the body is.
    """
    at, end = 0, len(body)
    entries_left = limits.items
    awaited = [1]  # values still to come, per level of nesting
    while awaited and at < end:
        if awaited[-1] == 0:
            awaited.pop()
            continue
        awaited[-1] -= 1
        if length := _WHOLE_LENGTHS[body[at]]:
            at += length
            continue
        at, values = _step(body, at)
        if values:
            entries_left -= values
            awaited.append(values)
            if entries_left < 0:
                raise ContractError("too_large", f"body: more than {limits.items} entries in arrays and maps")
            if len(awaited) > MAX_DEPTH + 1:
                raise ContractError("malformed", f"body: nested deeper than {MAX_DEPTH} at byte {at}")
    if at > end or any(awaited):
        raise ContractError("malformed", f"body: ends in the middle of a value, at byte {end}")
    if at < end:
        raise ContractError("malformed", f"body: {end - at} bytes follow the end of the message at byte {at}")


def _step(body: bytes, at: int) -> tuple[int, int]:
    """Read the head at an offset; returns the offset behind it and its payload, and how many values it contains."""
    head = body[at]
    behind = at + 1
    if 0x80 <= head < 0xA0:
        return behind, (head & 0x0F) * (2 if head < 0x90 else 1)
    if head in _SIZED:
        width = _SIZED[head]
        return behind + width + int.from_bytes(body[behind : behind + width]), 0
    if head in _COUNTED:
        width, per_entry = _COUNTED[head]
        return behind + width, per_entry * int.from_bytes(body[behind : behind + width])
    kind = "reserved" if head == 0xC1 else "an extension type, which the contract does not have"
    raise ContractError("malformed", f"body: the value at byte {at} is {kind}")
