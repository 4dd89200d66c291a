"""A cache never keeps a model from being served, and says what was wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inferq_worker.runtime import reuse
from inferq_worker.runtime.cache import DiskCache, Key
from inferq_worker.runtime.reuse import Cached, Opened, Source

MODEL = Path("/models/m/1/model.onnx")


@dataclass
class Library:
    """Stands in for ONNX Runtime: a session is the source it was made from.

    Attributes:
        made: every attempt, in order.
        fail: an exception for the attempts it picks.
    """

    made: list[Source] = field(default_factory=list)
    fail: Callable[[Source], bool] = lambda _: False

    def create(self, source: Source) -> Source:
        self.made.append(source)
        if self.fail(source):
            raise RuntimeError("No space left on device")
        if source.save_to is not None:
            source.save_to.write_bytes(b"graph")
            (source.save_to.parent / reuse.WEIGHTS_FILE).write_bytes(b"weights")
        if source.engines is not None and not list(source.engines.iterdir()):
            (source.engines / "m.engine").write_bytes(b"engine")
        return source


@pytest.fixture(name="library")
def _library() -> Library:
    return Library()


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path, 2**20)


def start(store: DiskCache, library: Library, *, engines: bool = False, keep: bool = True) -> Opened:
    key = Key("tensorrt" if engines else "cpu", {"model": "m"})
    return Cached(store, key, MODEL, 10, library.create, lambda _: keep, makes_engines=engines).open()


def entry(store: DiskCache) -> Path:
    return next(path for path in store._folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def test_the_first_start_builds_and_the_second_reuses(store: DiskCache, library: Library) -> None:
    assert (start(store, library).use, start(store, library).use) == ("built", "reused")
    first, second = library.made
    assert first.path == MODEL
    assert (second.path, second.optimised, second.save_to) == (entry(store) / "model.onnx", True, None)


def test_engines_are_reused_with_the_original_model(store: DiskCache, library: Library) -> None:
    assert [start(store, library, engines=True).use for _ in range(2)] == ["built", "reused"]
    assert [source.path for source in library.made] == [MODEL, MODEL]
    assert library.made[1].engines == entry(store)
    assert not library.made[1].optimised


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_a_damaged_entry_is_made_again_with_a_note(store: DiskCache, library: Library, name: str) -> None:
    start(store, library)
    (entry(store) / name).write_bytes(bytes((entry(store) / name).stat().st_size))
    opened = start(store, library)
    assert opened.use == "built"
    assert f"the content of {name} has changed" in opened.notes[0]
    assert start(store, library) == Opened(library.made[-1], "reused")


def test_an_entry_that_does_not_load_is_made_again_with_a_note(store: DiskCache, library: Library) -> None:
    start(store, library)
    library.fail = lambda source: source.optimised
    opened = start(store, library)
    assert (opened.use, opened.session.path) == ("built", MODEL)
    assert opened.notes == ("a cache entry that does not load was dropped and is made again: No space left on device",)


def test_a_model_that_cannot_be_written_is_served_all_the_same(store: DiskCache, library: Library) -> None:
    library.fail = lambda source: source.save_to is not None
    opened = start(store, library)
    assert (opened.use, opened.session) == ("failed", Source(MODEL))
    assert opened.notes == ("the cache is not written: No space left on device",)


def test_a_model_that_does_not_load_at_all_fails_with_its_own_error(store: DiskCache, library: Library) -> None:
    library.fail = lambda _: True
    with pytest.raises(RuntimeError, match="No space left"):
        start(store, library)
    assert [path.name for path in store._folder.iterdir()] == []


def test_an_entry_that_cannot_be_stored_costs_no_second_load(
    store: DiskCache, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(key: Key, staged: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "publish", full)
    opened = start(store, library)
    assert opened.use == "failed"
    assert "the cache is not written" in opened.notes[0]
    assert len(library.made) == 1


def test_a_folder_that_went_away_costs_only_the_cache(store: DiskCache, library: Library) -> None:
    store._folder.rmdir()
    opened = start(store, library)
    assert (opened.use, opened.session) == ("failed", Source(MODEL))
    assert "the cache is not used" in opened.notes[0]


def test_what_another_provider_made_is_not_kept(store: DiskCache, library: Library) -> None:
    assert start(store, library, keep=False) == Opened(library.made[0], "off")
    assert list(store._folder.iterdir()) == []


def test_who_waited_for_a_build_uses_it(store: DiskCache, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = store.lock

    def late(name: str, limit_s: float) -> object:
        monkeypatch.setattr(store, "lock", lock)
        assert start(store, library, engines=True).use == "built"  # another worker, while this one waits
        return lock(name, limit_s)

    monkeypatch.setattr(store, "lock", late)
    assert start(store, library, engines=True).use == "reused"


def test_who_waits_too_long_builds_for_itself_and_says_so(
    store: DiskCache, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "BUILD_WAIT_S", 0.0)
    with store.lock(reuse.BUILD_LOCK, 0.0):
        opened = start(store, library, engines=True)
    assert (opened.use, opened.session) == ("failed", Source(MODEL))
    assert "another worker has held" in opened.notes[0]
