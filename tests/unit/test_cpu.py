"""What CPU workers could do: absent, stale, busy, and the gap that several GPU workers see at once."""

from __future__ import annotations

import pytest

from inferq_worker.cpu import HOP_S, STALE_AFTER_S, CpuPool, CpuWorker

NOW_S = 1_000.0
RUN_S = 0.1
ALONE = {"gpu_workers": 1, "queued_jobs": 0}


def worker(*, run_s: float = RUN_S, lanes: int = 2, held_jobs: int = 0, beat: int = 1) -> CpuWorker:
    return CpuWorker(run_s, lanes, held_jobs, beat)


def pool_of(*workers: CpuWorker, gpu_workers: int = 1, queued_jobs: int | None = 0) -> CpuPool:
    pool = CpuPool()
    named = {str(number): one for number, one in enumerate(workers)}
    pool.update(named, gpu_workers=gpu_workers, queued_jobs=queued_jobs, now_s=NOW_S)
    return pool


def wait_s(pool: CpuPool, rows: int = 1) -> float:
    finish_s = pool.finish_s(rows, NOW_S)
    assert finish_s is not None
    return finish_s - NOW_S


def test_an_entry_comes_back_from_the_store_as_it_went_in() -> None:
    entry = CpuWorker(0.125, 4, 17, 99)
    assert CpuWorker.decode(entry.encode()) == entry


@pytest.mark.parametrize("pool", [CpuPool(), pool_of()])
def test_without_cpu_workers_nobody_would_answer(pool: CpuPool) -> None:
    assert pool.finish_s(1, NOW_S) is None


def test_an_idle_worker_answers_after_the_hop_and_one_run_for_each_row() -> None:
    assert wait_s(pool_of(worker())) == pytest.approx(HOP_S + RUN_S)
    assert wait_s(pool_of(worker()), rows=3) == pytest.approx(HOP_S + 3 * RUN_S)


def test_what_waits_and_what_workers_hold_is_shared_among_all_lanes() -> None:
    pool = pool_of(worker(held_jobs=3), worker(held_jobs=2), queued_jobs=7)
    assert wait_s(pool) == pytest.approx(HOP_S + (7 + 5) // 4 * RUN_S + RUN_S)


def test_the_slowest_worker_counts() -> None:
    assert wait_s(pool_of(worker(run_s=0.1), worker(run_s=0.4))) == pytest.approx(HOP_S + 0.4)


def test_what_one_diverts_makes_the_gap_smaller_for_the_next() -> None:
    pool = pool_of(worker(lanes=1))
    pool.diverted()
    pool.diverted()
    assert wait_s(pool) == pytest.approx(HOP_S + 2 * RUN_S + RUN_S)


def test_a_new_count_of_the_queue_holds_what_was_diverted_before() -> None:
    pool = pool_of(worker(lanes=1))
    pool.diverted()
    pool.update({"0": worker(lanes=1, beat=2)}, gpu_workers=1, queued_jobs=1, now_s=NOW_S)
    assert wait_s(pool) == pytest.approx(HOP_S + RUN_S + RUN_S)


def test_without_a_new_count_the_old_one_stands_and_so_does_what_was_diverted_since() -> None:
    pool = pool_of(worker(lanes=1), queued_jobs=4)
    pool.diverted()
    pool.update({"0": worker(lanes=1, beat=2)}, gpu_workers=1, queued_jobs=None, now_s=NOW_S)
    assert wait_s(pool) == pytest.approx(HOP_S + 5 * RUN_S + RUN_S)


def test_several_gpu_workers_do_not_all_divert_into_the_same_gap() -> None:
    gpus = [pool_of(worker(lanes=1), gpu_workers=4) for _ in range(4)]
    deadline_s = NOW_S + HOP_S + 8 * RUN_S
    diverted = 0
    for gpu in gpus:
        while (finish_s := gpu.finish_s(1, NOW_S)) is not None and finish_s <= deadline_s + 1e-9:
            gpu.diverted()
            diverted += 1
    assert diverted == 8, "as many as fit before the deadline, by all four together"


def test_a_worker_that_is_not_in_the_count_of_gpu_workers_yet_counts_itself() -> None:
    pool = pool_of(worker(lanes=1), gpu_workers=0)
    pool.diverted()
    assert wait_s(pool) == pytest.approx(HOP_S + RUN_S + RUN_S)


def test_an_entry_whose_beat_stands_still_is_not_counted_on() -> None:
    pool = pool_of(worker(run_s=9.0, held_jobs=9), worker())
    later_s = NOW_S + STALE_AFTER_S
    pool.update({"0": worker(run_s=9.0, held_jobs=9), "1": worker(beat=2)}, **ALONE, now_s=later_s)
    assert pool.finish_s(1, later_s) == pytest.approx(later_s + HOP_S + RUN_S)
    pool.update({"1": worker(beat=2)}, **ALONE, now_s=later_s + STALE_AFTER_S)
    assert pool.finish_s(1, later_s + STALE_AFTER_S) is None


def test_a_picture_that_is_not_renewed_ages_out_by_this_processs_own_clock() -> None:
    pool = pool_of(worker())
    assert pool.lives(NOW_S + STALE_AFTER_S - 0.01)
    assert pool.finish_s(1, NOW_S + STALE_AFTER_S - 0.01) is not None
    assert not pool.lives(NOW_S + STALE_AFTER_S)
    assert pool.finish_s(1, NOW_S + STALE_AFTER_S) is None


def test_a_worker_that_beats_again_is_counted_on_again() -> None:
    pool = pool_of(worker())
    for beat, later_s in ((1, 6.0), (2, 7.0), (2, 11.9)):
        pool.update({"0": worker(beat=beat)}, **ALONE, now_s=NOW_S + later_s)
    assert pool.lives(NOW_S + 11.9)


def test_a_worker_whose_entry_is_gone_is_forgotten_at_once() -> None:
    pool = pool_of(worker(lanes=1), worker(lanes=1))
    pool.update({"1": worker(lanes=1)}, gpu_workers=1, queued_jobs=2, now_s=NOW_S + 1)
    assert wait_s(pool) == pytest.approx(HOP_S + 3 * RUN_S)
    pool.update({}, gpu_workers=1, queued_jobs=None, now_s=NOW_S + 2)
    assert not pool.lives(NOW_S + 2)


def test_a_worker_without_lanes_is_none() -> None:
    assert not pool_of(worker(lanes=0)).lives(NOW_S)
    assert pool_of(worker(lanes=0)).finish_s(1, NOW_S) is None
