"""A folder of things that took long to make: optimised graphs, TensorRT engines. Entries are whole or not there.

What lies here is loaded as code, so the folder belongs to one user and every byte is checked against its entry's list
before use. Knows nothing of ONNX Runtime. Any `OSError` means "go on without": the caller says so.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMAT = "1"
_MANIFEST = "entry.json"
_NEW, _OLD = ".new-", ".old-"
_LEFTOVER_S = 86_400.0  # no build takes a day: what is older was left by a worker that died
_SPARE_BYTES = 64 * 2**20
_LOCK_POLL_S = 0.2
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that an entry's content depends on.

    Attributes:
        kind: first part of the folder's name, for people.
        facts: compared as a whole; any difference is another entry.
    """

    kind: str
    facts: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of the entry's folder."""
        text = json.dumps({"format": _FORMAT, **self.facts}, sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored folder. Use nothing of it for good before `check` has answered.

    Attributes:
        folder: where its files lie.
        check: waits for the rest of the check; how the entry differs from its list, or nothing.
    """

    folder: Path
    check: Callable[[], str]


class CorruptEntry(Exception):  # noqa: N818 - says what happened
    """An entry was not what it was when it was stored, and has been dropped. The message says how it differed."""


class DiskCache:
    """Entries below `<root>/inferq-<uid>`, safe with several workers at a time: whoever is first stores it.

    Args:
        root: made if it is not there.
        limit_bytes: most bytes of all entries; the least recently used go first.

    Raises:
        OSError: the folder cannot be made or written, or others can write it.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._folder = root.resolve() / f"inferq-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        _check_private(self._folder)
        self._limit_bytes = limit_bytes

    def find(self, key: Key, *, later: frozenset[str] = frozenset()) -> Entry | None:
        """An entry, checked; None if there is none.

        Args:
            key: which one.
            later: files whose content is hashed on another thread meanwhile. For weights, which are large and harm
                nobody before they are used.

        Raises:
            CorruptEntry: it was there but damaged.
        """
        folder = self._folder / key.name
        if not folder.exists():
            return None
        try:
            pending = _check(folder, later)
        except _Damaged as error:
            if not folder.exists():  # another worker dropped it under our eyes
                return None
            self.drop(folder)
            raise CorruptEntry(str(error)) from error
        with contextlib.suppress(OSError):
            os.utime(folder / _MANIFEST)  # used now: not the next to go
        return Entry(folder, pending)

    def drop(self, folder: Path) -> None:
        """Remove an entry: at once for who looks for it, and from the disk as far as that lets itself be done."""
        grave = Path(tempfile.mkdtemp(prefix=_OLD, dir=self._folder))
        with contextlib.suppress(FileNotFoundError):  # another worker was quicker
            folder.rename(grave / folder.name)
        shutil.rmtree(grave, ignore_errors=True)

    @contextlib.contextmanager
    def staging(self, expected_bytes: int) -> Iterator[Path]:
        """A private folder to build an entry in; whatever is not published is removed.

        Raises:
            OSError: there is no room for `expected_bytes`, on the disk or under the limit.
        """
        if expected_bytes > self._limit_bytes:
            raise OSError(f"it needs {expected_bytes} bytes, cache_limit_bytes is {self._limit_bytes}")
        free = shutil.disk_usage(self._folder).free
        if free < 2 * expected_bytes + _SPARE_BYTES:
            raise OSError(f"only {free} bytes are free on the disk")
        folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, key: Key, staged: Path) -> None:
        """Make a staged folder the entry of `key`, unless another worker has already stored it.

        Raises:
            OSError: it could not be made durable, or is larger than the limit.
        """
        files = {file.name: file for file in staged.iterdir()}
        sizes = {name: file.stat().st_size for name, file in files.items()}
        if not files or sum(sizes.values()) > self._limit_bytes:
            raise OSError(f"it has {sum(sizes.values())} bytes, cache_limit_bytes is {self._limit_bytes}")
        for file in files.values():
            file.chmod(0o600)
        listed = {name: {"bytes": sizes[name], "sha256": _sha256(file)} for name, file in sorted(files.items())}
        manifest = staged / _MANIFEST
        manifest.write_text(json.dumps({"facts": dict(key.facts), "files": listed}, indent=1), "utf-8")
        for each in (*files.values(), manifest, staged):
            _sync(each)
        with contextlib.suppress(FileExistsError):
            _rename_into(staged, self._folder / key.name)
        _sync(self._folder)
        self._trim(self._folder / key.name)

    @contextlib.contextmanager
    def lock(self, name: str, limit_s: float) -> Iterator[None]:
        """Hold a lock that one process of this machine has at a time; it falls when that process ends.

        Raises:
            TimeoutError: another process held it for `limit_s`.
        """
        give_up_s = time.monotonic() + limit_s
        with (self._folder / f"{name}.lock").open("wb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= give_up_s:
                        raise TimeoutError(f"another worker has held {file.name} for {limit_s:g} s") from None
                    time.sleep(_LOCK_POLL_S)
            yield

    def shared_folder(self, name: str) -> Path:
        """A folder that is no entry: unchecked, never evicted. Only for what cannot change an answer."""
        folder = self._folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _trim(self, newest: Path) -> None:
        """Keep within the limit and sweep what dead workers left; another worker may do the same at this moment."""
        entries: list[tuple[float, int, Path]] = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if folder.name.startswith((_NEW, _OLD)):
                    if time.time() - folder.stat().st_mtime > _LEFTOVER_S:
                        shutil.rmtree(folder, ignore_errors=True)
                elif (folder / _MANIFEST).exists():
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    entries.append(((folder / _MANIFEST).stat().st_mtime, size, folder))
        total = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if total > self._limit_bytes and folder != newest:
                self.drop(folder)
                total -= size


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        raise PermissionError(
            f"{folder} must be a folder that only its owner can enter, because what lies there is run as code; "
            f"run: chmod 700 {folder}, or remove it if it is not yours"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


class _Damaged(Exception):  # noqa: N818 - a signal inside this module
    pass


def _check(folder: Path, later: frozenset[str]) -> Callable[[], str]:
    """Compare an entry with its own list; the content of `later` goes on being hashed when this returns."""
    try:
        listed: dict[str, dict[str, Any]] = json.loads((folder / _MANIFEST).read_bytes())["files"]
        present = {file.name for file in folder.iterdir()} - {_MANIFEST}
        if present != listed.keys():
            raise _Damaged(f"it holds {sorted(present)} and lists {sorted(listed)}")
        wanted = {folder / name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in listed.items()}
        for file, (size_bytes, digest) in wanted.items():
            status = file.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise _Damaged(f"{file.name} is not a plain file of this user")
            if status.st_size != size_bytes:
                raise _Damaged(f"{file.name} has {status.st_size} bytes instead of {size_bytes}")
            if file.name not in later and (problem := _content_problem(file, digest)):
                raise _Damaged(problem)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"its list cannot be read: {error}") from error
    hasher = ThreadPoolExecutor(1, thread_name_prefix="cache-check")
    pending = [
        hasher.submit(_content_problem, file, digest) for file, (_, digest) in wanted.items() if file.name in later
    ]
    hasher.shutdown(wait=False)
    return lambda: "; ".join(problem for future in pending if (problem := future.result()))


def _content_problem(file: Path, digest: str) -> str:
    try:
        return "" if _sha256(file) == digest else f"the content of {file.name} has changed"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_into(staged: Path, entry: Path) -> None:
    try:
        # A folder never replaces one that has files, so the first worker's entry stays.
        staged.rename(entry)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(str(entry)) from error
        raise
