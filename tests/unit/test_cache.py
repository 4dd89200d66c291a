"""The cache on disk: entries are whole or not there, whoever else works in the folder."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferq_worker.runtime.cache import CorruptEntry, DiskCache, Key

KEY = Key("cpu", {"model": "m", "onnxruntime": "1"})
LIMIT = 2**20


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", LIMIT)


def put(store: DiskCache, key: Key = KEY, **files: bytes) -> None:
    with store.staging(0) as folder:
        for name, content in (files or {"graph": b"graph", "weights": b"weights"}).items():
            (folder / name).write_bytes(content)
        store.publish(key, folder)


def found(store: DiskCache, key: Key = KEY) -> Path:
    entry = store.find(key)
    assert entry is not None
    return entry.folder


def leftovers(store: DiskCache) -> list[str]:
    return [path.name for path in store._folder.iterdir() if path.name.startswith(".")]


def test_what_was_stored_is_found_whole(store: DiskCache) -> None:
    assert store.find(KEY) is None
    put(store)
    folder = found(store)
    assert (folder / "graph").read_bytes() == b"graph"
    assert (folder / "weights").read_bytes() == b"weights"
    assert leftovers(store) == []


def test_another_fact_is_another_entry(store: DiskCache) -> None:
    put(store)
    assert store.find(Key("cpu", {"model": "m", "onnxruntime": "2"})) is None
    assert store.find(Key("cuda", KEY.facts)) is None


def test_the_order_of_the_facts_does_not_matter() -> None:
    assert Key("cpu", dict(reversed(list(KEY.facts.items())))).name == KEY.name


def cut(folder: Path) -> None:
    (folder / "weights").write_bytes(b"weight")


def flip(folder: Path) -> None:
    (folder / "weights").write_bytes(b"weightz")


def link(folder: Path) -> None:
    shutil.move(folder / "weights", folder.parent / "elsewhere")
    (folder / "weights").symlink_to(folder.parent / "elsewhere")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (cut, "weights has 6 bytes instead of 7"),
    (flip, "the content of weights has changed"),
    (link, "weights is not a plain file"),
    (lambda folder: (folder / "weights").unlink(), "it holds .*graph.* and lists .*weights"),
    (lambda folder: (folder / "more").write_bytes(b""), "it holds .*more"),
    (lambda folder: (folder / "entry.json").unlink(), "its list cannot be read"),
    (lambda folder: (folder / "entry.json").write_bytes(b"{"), "its list cannot be read"),
    (lambda folder: (folder / "entry.json").write_bytes(b"[]"), "its list cannot be read"),
    (lambda folder: (folder / "entry.json").write_bytes(b'{"files": {"graph": 1, "weights": 2}}'), "its list cannot"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_entry_is_told_of_and_dropped(
    store: DiskCache, damage: Callable[[Path], object], message: str
) -> None:
    put(store)
    damage(found(store))
    with pytest.raises(CorruptEntry, match=message):
        store.find(KEY)
    assert store.find(KEY) is None
    assert leftovers(store) == []


def test_a_file_that_is_hashed_later_is_told_of_by_the_check(store: DiskCache) -> None:
    put(store)
    whole = store.find(KEY, later=frozenset({"weights"}))
    assert whole is not None
    assert whole.check() == ""
    flip(whole.folder)
    damaged = store.find(KEY, later=frozenset({"weights"}))
    assert damaged is not None
    assert damaged.check() == "the content of weights has changed"


def test_even_a_file_that_is_hashed_later_must_have_its_size(store: DiskCache) -> None:
    put(store)
    cut(found(store))
    with pytest.raises(CorruptEntry, match="6 bytes instead of 7"):
        store.find(KEY, later=frozenset({"weights"}))


def test_nobody_else_can_look_in(store: DiskCache, tmp_path: Path) -> None:
    put(store)
    assert [path.stat().st_mode & 0o777 for path in (store._folder, found(store))] == [0o700, 0o700]
    assert {path.stat().st_mode & 0o777 for path in found(store).iterdir() if path.name != "entry.json"} == {0o600}
    assert (tmp_path / "cache" / f"inferq-{os.getuid()}").is_dir()


def test_a_folder_that_others_can_enter_is_refused_with_the_mend(store: DiskCache, tmp_path: Path) -> None:
    store._folder.chmod(0o770)
    with pytest.raises(PermissionError, match=r"run: chmod 700 .*inferq-"):
        DiskCache(tmp_path / "cache", LIMIT)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"inferq-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder"):
        DiskCache(tmp_path, LIMIT)


def test_the_first_of_two_workers_stores_the_entry(store: DiskCache) -> None:
    put(store, graph=b"first")
    put(store, graph=b"second")
    assert (found(store) / "graph").read_bytes() == b"first"
    assert leftovers(store) == []


def test_workers_at_a_time_see_an_entry_whole_or_not_at_all(store: DiskCache) -> None:
    failures: list[str] = []
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        barrier.wait()
        for _ in range(15):
            try:
                put(store, graph=bytes([number]) * 5000, weights=b"w" * 5000)
                entry = store.find(KEY)
                if entry is None or (entry.folder / "weights").stat().st_size != 5000:
                    failures.append("half there")
            except CorruptEntry as error:
                failures.append(str(error))
            except OSError as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert leftovers(store) == []


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    store = DiskCache(tmp_path, 2500)
    keys = [Key("cpu", {"model": name}) for name in "abc"]
    for age_s, key in zip((300, 200), keys, strict=False):
        put(store, key, graph=bytes(1000))
        past = time.time() - age_s
        os.utime(found(store, key) / "entry.json", (past, past))
    found(store, keys[0])  # used now, so the second is the older one
    put(store, keys[2], graph=bytes(1000))
    assert [store.find(key) is not None for key in keys] == [True, False, True]


def test_an_entry_over_the_limit_is_not_stored_and_costs_no_other_its_place(tmp_path: Path) -> None:
    store = DiskCache(tmp_path, 2500)
    put(store)
    with pytest.raises(OSError, match="it has 3000 bytes, cache_limit_bytes is 2500"):
        put(store, Key("cpu", {"model": "large"}), graph=bytes(3000))
    assert store.find(KEY) is not None
    with pytest.raises(OSError, match="it needs 3000 bytes"), store.staging(3000):
        pass


def test_a_disk_without_room_is_not_filled_up(store: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="only 1000 bytes are free"), store.staging(10):
        pass
    assert leftovers(store) == []


def test_what_is_not_published_is_removed(store: DiskCache) -> None:
    def interrupted() -> None:
        with store.staging(0) as folder:
            (folder / "half").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert leftovers(store) == []


def test_what_a_dead_worker_left_is_swept_and_what_a_living_one_builds_is_not(store: DiskCache) -> None:
    old, young = store._folder / ".new-old", store._folder / ".new-young"
    for folder in (old, young):
        folder.mkdir()
    past = time.time() - 2 * 86_400
    os.utime(old, (past, past))
    put(store)
    assert leftovers(store) == [".new-young"]


def test_only_one_holds_the_lock(store: DiskCache) -> None:
    with store.lock("build", 0.0):
        with (
            pytest.raises(TimeoutError, match=r"another worker has held .*build\.lock for 0 s"),
            store.lock("build", 0.0),
        ):
            pass
        with store.lock("other", 0.0):
            pass
    with store.lock("build", 0.0):
        pass


def test_the_lock_is_waited_for(store: DiskCache) -> None:
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock("build", 5.0):
            holding.set()
            done.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(5)
    threading.Timer(0.05, done.set).start()
    with store.lock("build", 5.0):
        assert done.is_set()
    thread.join()
