import io

from inferq.progress import Progress, bar_line, duration


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_line_says_how_far_how_fast_and_how_long_still() -> None:
    line = bar_line(0.25, ok=990, failed=10, elapsed_s=10)

    assert line == " 25% [######..................]  1,000 jobs  100/s  10 failed  0:30 left"


def test_without_a_known_size_there_is_no_bar() -> None:
    assert bar_line(None, ok=5, failed=0, elapsed_s=61) == "5 jobs  0/s  1:01"


def test_the_ends_are_drawn_without_nonsense() -> None:
    assert bar_line(0, ok=0, failed=0, elapsed_s=0).startswith("  0% [........")
    assert bar_line(1.2, ok=7, failed=0, elapsed_s=7) == f"100% [{'#' * 24}]  7 jobs  1/s  0:07"


def test_durations_are_read_like_a_clock() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]


def test_it_draws_over_itself_and_not_too_often() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, share=lambda: 0.5, clock=clock)
    for _ in range(100):
        progress.add(ok=True)
    assert stream.getvalue().count("\r") == 1

    clock.now_s += 1
    progress.add(ok=False)
    progress.close()

    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().endswith("\n")
    assert (progress.ok, progress.failed, progress.jobs_per_s) == (100, 1, 101)


def test_without_a_stream_it_only_counts() -> None:
    progress = Progress(None)
    progress.add(ok=True)
    progress.close()

    assert progress.ok == 1
