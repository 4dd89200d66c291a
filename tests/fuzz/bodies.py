"""Bodies that nobody should send: whole ones with something changed, whole trees with a wrong node, and noise.

Seeds are the golden vectors of the contract and what lies in `corpus/` (bodies that once showed something). Everything
follows from the random generator that is handed in.
"""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgpack

_HERE = Path(__file__).parent
_VECTORS = _HERE.parents[1] / "schemas" / "vectors"
# Heads of msgpack that claim much, are not allowed, or mean another type than the byte they may replace.
_HEADS = tuple(
    map(
        bytes.fromhex,
        [
            *("80", "90", "a0", "c0", "c1", "c2", "c3", "ff", "7f", "81", "9f", "8f", "bf"),
            *("dc0100", "dcffff", "dd00000001", "ddffffffff", "de0001", "deffff", "df7fffffff", "dfffffffff"),
            *("c400", "c4ff", "c5ffff", "c60000ffff", "c6ffffffff", "d900", "d9ff", "daffff", "dbffffffff"),
            *("c700ff", "c8ffff01", "c9ffffffff01", "d4ff00", "d501ffff", "d6ff00000000", "d7ff0000000000000000"),
            *("ca7fc00000", "cb7ff8000000000000", "cb7ff0000000000000", "cf7fffffffffffffff"),
            *("cfffffffffffffffff", "d38000000000000000", "d3ffffffffffffffff", "ceffffffff"),
        ],
    )
)
_WORDS = (
    *("id", "model", "inputs", "version", "dtype", "shape", "data", "ref", "v", "params", "force", "late", "fallback"),
    *("float32", "string", "bfloat16", "object", "resnet", "__proto__", "a" * 300, "x\x00y", "\ud7ff", "a.b", "#", "*"),
    *(
        "inferq:{j}:in:x",
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "drop",
        "serve",
        "allow",
        "never",
        "",
        "\r\n",
    ),
)
_NUMBERS = (0, 1, -1, 2, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324)


def seeds() -> tuple[bytes, ...]:
    """All seeds, in the order of their names."""
    files = sorted([*_VECTORS.glob("*.msgpack"), *(_HERE / "corpus").glob("*.msgpack")])
    return tuple(file.read_bytes() for file in files)


class Bodies:
    """Makes bodies without end.

    Args:
        random: where every choice comes from.
        given: whole bodies to start from; large ones are used less often.
    """

    def __init__(self, random: Random, given: Sequence[bytes]) -> None:
        self._random = random
        self._small = [body for body in given if len(body) <= 1024]
        self._large = [body for body in given if len(body) > 1024]
        self._trees = [tree for body in self._small if (tree := _tree(body)) is not None]
        self._leaves = self._leaf_makers()
        self._values = (*self._leaves, *self._container_makers())
        self._ways: tuple[Callable[[], bytes], ...] = (
            *(self._changed_bytes,) * 9,
            *(self._changed_tree,) * 9,
            self._noise,
            self._nested,
        )

    def next(self) -> bytes:
        """One more body."""
        return self._random.choice(self._ways)()

    def _seed(self) -> bytes:
        if self._large and self._random.random() < 0.0005:
            return self._random.choice(self._large)
        return self._random.choice(self._small)

    def _changed_bytes(self) -> bytes:
        random = self._random
        body = bytearray(self._seed())
        for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
            at = random.randrange(len(body) + 1)
            match random.randrange(6):
                case 0 if at < len(body):
                    body[at] = random.randrange(256)
                case 1:
                    head = random.choice(_HEADS)
                    body[at : at + random.choice((0, 1, len(head)))] = head
                case 2:
                    del body[at : at + random.randrange(1, 9)]
                case 3:
                    del body[at:]
                case 4:
                    other = self._seed()
                    body[at:] = other[random.randrange(len(other) + 1) :]
                case _:
                    body[at:at] = body[at : at + random.randrange(1, 64)]
        return bytes(body)

    def _changed_tree(self) -> bytes:
        tree = self._random.choice(self._trees)
        for _ in range(self._random.choice((1, 1, 2, 3))):
            tree = self._changed(tree)
        if self._random.random() < 0.1:
            tree = [tree] * (257 if self._random.random() < 0.005 else self._random.choice((1, 2, 3)))
        return _pack(tree)

    def _changed(self, node: Any) -> Any:
        """The tree with one node somewhere replaced, left out, repeated or renamed."""
        random = self._random
        if not isinstance(node, dict | list) or not node or random.random() < 0.15:
            return self._value(3)
        if isinstance(node, dict):
            return self._changed_map(node, random.choice(list(node)))
        at = random.randrange(len(node))
        if random.random() < 0.2:
            return node[:at] + node[at + 1 :]
        return [*node[:at], self._changed(node[at]), *node[at + random.choice((0, 1)) :]]

    def _changed_map(self, node: dict[Any, Any], key: Any) -> dict[Any, Any]:
        random = self._random
        rest = {name: value for name, value in node.items() if name != key}
        match random.randrange(6):
            case 0:
                return rest
            case 1:
                return {**rest, random.choice(_WORDS): node[key]}
            case 2:
                return {**node, random.choice((*_WORDS, 7, None, 1.5, b"id")): self._value(2)}
            case _:
                return {**rest, key: self._changed(node[key])}

    def _value(self, depth: int) -> Any:
        return self._random.choice(self._leaves if depth == 0 else self._values)(depth)

    def _leaf_makers(self) -> tuple[Callable[[int], Any], ...]:
        random = self._random
        return (
            lambda _: random.choice((None, True, False)),
            lambda _: random.choice(_NUMBERS),
            lambda _: random.choice(_FLOATS),
            lambda _: random.choice(_WORDS),
            lambda _: random.randbytes(random.choice((0, 1, 4, 8, 64))),
            lambda _: msgpack.ExtType(random.randrange(127), random.randbytes(random.choice((0, 1, 8)))),
            lambda _: "x" * random.choice((1, 64, 128, 129, 4096, 4097)),
        )

    def _container_makers(self) -> tuple[Callable[[int], Any], ...]:
        random = self._random
        return (
            lambda depth: {random.choice(_WORDS): self._value(depth - 1) for _ in range(random.randrange(4))},
            lambda _: [random.choice(_NUMBERS) for _ in range(random.randrange(10))],
            lambda depth: [self._value(depth - 1) for _ in range(random.randrange(4))],
        )

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 5, 16, 64, 256)))

    def _nested(self) -> bytes:
        """Containers inside containers, or more entries claimed than there are bytes."""
        random = self._random
        opener = random.choice((b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\xde\x00\x01\xa0"))
        if random.random() < 0.5:
            return opener * random.choice((1, 7, 8, 9, 10, 100)) + random.choice(_HEADS)
        head = b"\xdd" + struct.pack(">I", random.choice((3, 256, 257, 1000, 2**18, 2**18 + 1, 2**32 - 1)))
        return head + random.choice((b"\x80", b"\x90", b"\xc0", b"\xa0")) * random.choice((0, 3, 3, 3, 256, 257, 1000))


def _tree(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, strict_map_key=False)
    except ValueError:
        return None


def _pack(tree: Any) -> bytes:
    packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return packed
