import io

from inferq.progress import Progress, bar_line, duration


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_line_says_how_far_how_fast_and_how_long_still() -> None:
    line = bar_line(0.25, answered=1000, read=1024, failed=10, per_s=100)

    assert line == " 25% [######..................]  1,000/1,024 jobs  100/s  10 failed  0:30 left"


def test_without_a_known_size_there_is_neither_bar_nor_percentage() -> None:
    assert bar_line(None, answered=0, read=1, failed=0, per_s=0) == "0/1 job  0/s"


def test_the_ends_are_drawn_without_nonsense() -> None:
    assert bar_line(0, answered=0, read=0, failed=0, per_s=0).startswith("  0% [........")
    assert bar_line(1.2, answered=7, read=7, failed=0, per_s=1) == f"100% [{'#' * 24}]  7/7 jobs  1/s"
    assert bar_line(0.999, answered=999, read=1000, failed=0, per_s=1).startswith(" 99%")


def test_the_percentage_is_of_what_is_answered_and_not_of_what_is_read() -> None:
    stream = io.StringIO()
    progress = Progress(stream, share=lambda: 0.5, clock=Clock(), read=100)
    progress.add(ok=True)

    assert "  0% [" in stream.getvalue()
    assert "1/100 jobs" in stream.getvalue()


def test_a_note_stands_above_the_bar() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=Clock(), notes=stream)
    progress.note("no worker")

    assert stream.getvalue().startswith("\r\x1b[Kno worker\n\r0/0 jobs")


def test_a_note_is_a_plain_line_where_nothing_is_drawn() -> None:
    stream = io.StringIO()
    Progress(None, notes=stream).note("no worker")

    assert stream.getvalue() == "no worker\n"


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
