"""Whether files named on a command line can be what they are named for. Looks at names and kinds, opens nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferq.commands import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["check_input", "check_output"]

_KNOWN: Final = frozenset({".npz", ".jsonl", ".ndjson", ".json", ""})
"""Without a suffix are /dev/fd/63, a named pipe and their like: JSON lines."""
_MENDS: Final = {
    ".npy": "it holds one array without a name: write numpy.savez('jobs.npz', x=array)",
    ".onnx": "a model is served by `inferq worker --model FILE.onnx`, and named here by --model",
    ".gz": "unpack it: gunzip -c FILE | inferq submit --model NAME -",
    ".csv": 'write each row as a JSON line: {"x": [[1.5, 2.0]]}',
}


def check_input(file: Path) -> None:
    """Refuse a file that surely holds no jobs.

    Raises:
        CommandError: a directory, or a suffix of something else.
    """
    if file.is_dir():
        raise CommandError(f"{file} is a directory; name the .jsonl or .npz files in it")
    if file.suffix not in _KNOWN:
        mend = _MENDS.get(file.suffix, "rename it, or pipe JSON lines into `-`")
        raise CommandError(f"{file}: jobs come as .jsonl (a JSON object a line) or .npz, not as {file.suffix}; {mend}")


def check_output(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that cannot be written, or that would cost an input.

    Raises:
        CommandError: what is wrong, and the mend.
    """
    if path.is_dir():
        raise CommandError(f"--output {path} is a directory; name a .jsonl or .npz file in it")
    if path.suffix not in _KNOWN:
        raise CommandError(f"--output {path}: answers are written as .jsonl or .npz, not as {path.suffix}")
    if not path.parent.is_dir():
        raise CommandError(f"--output {path}: there is no directory {path.parent}; make it first")
    if path.is_file() and any(file.is_file() and file.samefile(path) for file in inputs):
        raise CommandError(f"--output {path} is also an input, which it would overwrite; name another file")
