"""Opens a session from what an earlier start left in the cache, or leaves it there for the next.

A cache never keeps a model from being served: whatever is wrong with it becomes a note for the operator, and the model
is loaded as if there were none. Stands between `ort.py`, which makes sessions, and `cache.py`, which keeps files.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inferq_worker.runtime.cache import CorruptEntry, DiskCache, Key

OPTIMISED_FILE, WEIGHTS_FILE = "model.onnx", "weights.bin"
BUILD_LOCK = "build"
# An engine of a large model takes minutes; whoever waits longer builds its own and does not keep it.
BUILD_WAIT_S = 900.0

CacheUse = Literal["off", "reused", "built", "failed"]


@dataclass(frozen=True, slots=True)
class Source:
    """What one attempt loads, and what it writes.

    Attributes:
        path: the model file, or the optimised one.
        optimised: the file needs no optimising any more.
        save_to: write the optimised graph to this file.
        engines: TensorRT reads and writes its engines in this folder.
    """

    path: Path
    optimised: bool = False
    save_to: Path | None = None
    engines: Path | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A session and how the cache took part; `notes` are for the operator."""

    session: Any
    use: CacheUse = "off"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cached:
    """One model's place in the cache.

    Args:
        store: the cache.
        key: what the content depends on.
        path: the original model file.
        size_bytes: of the original, with its external data.
        create: makes a session; raises what ONNX Runtime raises.
        worth_keeping: whether what the session wrote really belongs to `key`.
        makes_engines: keep TensorRT engines instead of the optimised graph.
    """

    store: DiskCache
    key: Key
    path: Path
    size_bytes: int
    create: Callable[[Source], Any]
    worth_keeping: Callable[[Any], bool]
    makes_engines: bool = False

    def open(self) -> Opened:
        """Open the session by the quickest way that works.

        Raises:
            Exception: what `create` raises for the original model without any cache.
        """
        notes: list[str] = []
        if (session := self._reuse(notes)) is not None:
            return Opened(session, "reused", tuple(notes))
        try:
            with self._alone():
                # Whoever waited for the lock may find that the other has built it.
                if self.makes_engines and (session := self._reuse(notes)) is not None:
                    return Opened(session, "reused", tuple(notes))
                return self._build(notes)
        except OSError as error:
            notes.append(f"the cache is not used: {error}")
        return Opened(self.create(Source(self.path)), "failed", tuple(notes))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Engines are built one at a time: two builds on one GPU would falsify each other's timings."""
        if not self.makes_engines:
            yield
            return
        with self.store.lock(BUILD_LOCK, BUILD_WAIT_S):
            yield

    def _reuse(self, notes: list[str]) -> Any | None:
        try:
            entry = self.store.find(self.key, later=frozenset({WEIGHTS_FILE}))
        except CorruptEntry as error:
            notes.append(f"a damaged cache entry was dropped and is made again: {error}")
            return None
        except OSError as error:
            notes.append(f"the cache cannot be read: {error}")
            return None
        if entry is None:
            return None
        try:
            session = self.create(
                Source(self.path, engines=entry.folder)
                if self.makes_engines
                else Source(entry.folder / OPTIMISED_FILE, optimised=True)
            )
        except Exception as error:  # noqa: BLE001 - the library's exceptions have no common base
            problem = entry.check() or _line(error)
        else:
            problem = entry.check()
        if not problem:
            return session
        notes.append(f"a cache entry that does not load was dropped and is made again: {problem}")
        with contextlib.suppress(OSError):
            self.store.drop(entry.folder)
        return None

    def _build(self, notes: list[str]) -> Opened:
        with self.store.staging(self.size_bytes) as folder:
            staged = (
                Source(self.path, engines=folder)
                if self.makes_engines
                else Source(self.path, save_to=folder / OPTIMISED_FILE)
            )
            try:
                session = self.create(staged)
            except Exception as error:  # noqa: BLE001 - as above
                # The model's fault or the disk's? If the original loads without writing, it was the disk's.
                session = self.create(Source(self.path))
                notes.append(f"the cache is not written: {_line(error)}")
                return Opened(session, "failed", tuple(notes))
            if not self.worth_keeping(session):
                return Opened(session, "off", tuple(notes))
            try:
                self.store.publish(self.key, folder)
            except OSError as error:
                notes.append(f"the cache is not written: {error}")
                return Opened(session, "failed", tuple(notes))
            return Opened(session, "built", tuple(notes))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
