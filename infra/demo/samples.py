"""The files that the demo sends: this repository's own, and generated ones whose type is known by construction.

Everything generated is the same on every machine and stays in memory. The expected types are those on which the model
is certain; a file without one is sent and answered all the same.
"""

import gzip
import io
import json
import random
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.demo.inputs import too_short

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
_EACH = 24
_MOST_OF_REPOSITORY = 300
_KNOWN = {
    ".ci/run": "shell",
    ".gitignore": "ignorefile",
    "LICENSE": "txt",
    "Makefile": "makefile",
    "README.md": "markdown",
    "docker-compose.yml": "yaml",
    "infra/docker/Dockerfile": "dockerfile",
    "infra/docker/models/example/1/model.onnx": "onnx",
    "infra/rabbitmq/definitions.json": "json",
    "producer/inferq/client.py": "python",
    "pyproject.toml": "toml",
    "worker/inferq_worker/app.py": "python",
}
_WORDS = (
    "queue",
    "batch",
    "deadline",
    "worker",
    "model",
    "answer",
    "lane",
    "broker",
    "result",
    "channel",
    "tensor",
    "window",
    "reply",
    "parking",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One file.

    Attributes:
        name: path in the repository, or `generated/...`.
        content: at least eight bytes that are not white space.
        expected: its type by magika's name; None where nobody vouches for one.
    """

    name: str
    content: bytes
    expected: str | None = None

    @property
    def generated(self) -> bool:
        """Whether the demo made it."""
        return self.name.startswith("generated/")


def own_source() -> Sample:
    """This very file."""
    path = Path(__file__)
    return Sample(str(path.relative_to(PROJECT_FOLDER)), path.read_bytes(), "python")


def repository_files(folder: Path = PROJECT_FOLDER) -> list[Sample]:
    """Read the repository's own files, those with a known type first."""
    names = sorted(_tracked(folder) or _walked(folder), key=lambda name: (name not in _KNOWN, name))
    paths = ((name, folder / name) for name in names)
    samples = (Sample(name, path.read_bytes(), _KNOWN.get(name)) for name, path in paths if _is_plain(path))
    return [sample for sample in samples if not too_short(sample.content)][:_MOST_OF_REPOSITORY]


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _tracked(folder: Path) -> list[str]:
    """Ask git; empty where there is no git, or the project came without its history."""
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return []
    return [name for name in listed.stdout.decode("utf-8", "replace").split("\0") if name]


def _walked(folder: Path) -> list[str]:
    """List the files in folders that are neither hidden nor made by building."""
    made = {"build", "dist", "node_modules", "__pycache__"}
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in paths if not any(part in made or part.startswith(".") for part in path.parent.parts)]


def generated_files() -> list[Sample]:
    """Make the generated files: `_EACH` of each type, no two alike."""
    return [
        Sample(f"generated/{number:02}.{kind}", make(random.Random(number)), kind)  # noqa: S311 - no secrets here
        for kind, make in _MAKERS.items()
        for number in range(_EACH)
    ]


def _prose(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words)).capitalize() + "."


def _gzip(chance: random.Random) -> bytes:
    return gzip.compress(_prose(chance, chance.randint(200, 4000)).encode(), mtime=0)


def _png(chance: random.Random) -> bytes:
    """A colour gradient of 16 to 96 pixels a side."""
    width, height = chance.randint(16, 96), chance.randint(16, 96)
    tint = chance.randbytes(3)
    rows = (
        b"\0"
        + bytes((x * tint[0] + y * tint[1] + channel * tint[2]) % 256 for x in range(width) for channel in (0, 1, 2))
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in chunks)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _json(chance: random.Random) -> bytes:
    jobs = [
        {"id": number, "model": chance.choice(_WORDS), "rows": chance.randint(1, 32), "note": _prose(chance, 4)}
        for number in range(chance.randint(3, 60))
    ]
    return json.dumps({"version": 1, "jobs": jobs}, indent=2).encode()


def _html(chance: random.Random) -> bytes:
    title = _prose(chance, 4)
    links = "\n".join(f'      <li><a href="/{word}.html">{word}</a></li>' for word in chance.sample(_WORDS, 4))
    body = "\n".join(f'    <p class="note">{_prose(chance, 12)}</p>' for _ in range(chance.randint(6, 40)))
    return f"""<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>{title}</title>
    <style>body {{ margin: 2rem auto; max-width: 40rem; }}</style>
  </head>
  <body>
    <h1>{title}</h1>
    <ul>
{links}
    </ul>
{body}
  </body>
</html>
""".encode()


def _elf(chance: random.Random) -> bytes:
    """A program for 64-bit Linux on x86 that runs, and does nothing but exit with a status of its own."""
    base, header_bytes, program_bytes, section_bytes = 0x400000, 64, 56, 64
    code = b"\xb8\x3c\x00\x00\x00" + b"\xbf" + struct.pack("<I", chance.randint(0, 127)) + b"\x0f\x05"
    code += b"\x90" * chance.randint(0, 64)
    names = b"\0.text\0.comment\0.shstrtab\0"
    comment = b"inferq demo: " + _prose(chance, chance.randint(3, 12)).encode() + b"\0"
    start = header_bytes + program_bytes
    at = [start, start + len(code), start + len(code) + len(comment)]
    table = -(-(at[2] + len(names)) // 8) * 8
    out = io.BytesIO()
    out.write(b"\x7fELF\x02\x01\x01" + bytes(9))
    entry = base + start
    out.write(
        struct.pack(
            "<HHIQQQIHHHHHH", 2, 62, 1, entry, header_bytes, table, 0, 64, program_bytes, 1, section_bytes, 4, 3
        )
    )
    out.write(struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, at[1], at[1], 0x1000))
    out.write(code + comment + names)
    out.write(bytes(table - out.tell()))
    sections = (
        (0, 0, 0, 0, 0, 0),
        (1, 1, 6, entry, at[0], len(code)),
        (7, 1, 0, 0, at[1], len(comment)),
        (16, 3, 0, 0, at[2], len(names)),
    )
    for name, kind, flags, address, offset, size in sections:
        out.write(struct.pack("<IIQQQQIIQQ", name, kind, flags, address, offset, size, 0, 0, 1, 0))
    return out.getvalue()


_MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "gzip": _gzip,
    "png": _png,
    "json": _json,
    "html": _html,
    "elf": _elf,
}
