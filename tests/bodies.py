"""Job bodies by hand, for tests of what a worker refuses."""

from typing import Any

import msgpack


def job_body(**fields: Any) -> bytes:
    """A job of one input, with these fields instead of the usual ones."""
    tensor = {"dtype": "float32", "shape": [1, 1], "data": b"\0" * 4}
    packed: bytes = msgpack.packb({"id": "j", "model": "iris", "inputs": {"x": tensor}, **fields})
    return packed
