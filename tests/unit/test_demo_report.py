"""What the demo says of its answers: wrong ones are seen and decide the exit status, batches are counted once."""

import gzip
import json
import zlib

import pytest
from infra.demo import report, samples, story
from infra.demo.asking import Asked
from infra.demo.inputs import Verdict
from infra.demo.report import Checks, Row
from infra.demo.samples import Sample

from inferq_schemas import BatchInfo, Result, Timing


def row(name: str, *, says: str, expected: str | None = None, rows: int = 1) -> Row:
    result = Result("id", "ok", timing_ms=Timing(total=5.0), batch=BatchInfo(rows, "full"))
    return Row(Sample(name, b"x" * 8, expected), Verdict(says, 0.9, sure=True), result)


def test_generated_files_are_what_they_claim_and_no_two_are_alike() -> None:
    files = samples.generated_files()
    by_type = {kind: [file.content for file in files if file.expected == kind] for kind in {f.expected for f in files}}

    assert len({file.content for file in files}) == len(files)
    assert set(by_type) == {"gzip", "png", "json", "html", "elf"}
    assert all(gzip.decompress(content) for content in by_type["gzip"])
    assert all(json.loads(content)["jobs"] for content in by_type["json"])
    for content in by_type["png"]:
        checked = content[12:29]  # the header chunk's kind and data
        assert int.from_bytes(content[29:33], "big") == zlib.crc32(checked)


def test_the_repository_has_files_of_known_type_and_they_come_first() -> None:
    files = samples.repository_files()
    known = [file.expected is not None for file in files]
    assert sum(known) >= 5
    assert known == sorted(known, reverse=True)


def test_a_wrong_known_answer_is_shown_named_and_fails_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    right = [row(f"{number}.png", says="png", expected="png") for number in range(5)]
    wrong = [row(f"odd{number}.png", says="bmp", expected="png") for number in range(3)]
    asked = Asked(one_by_one=[*right, *wrong], took_s=1.0)
    checks = Checks()

    assert [shown.sample.name for shown in report.excerpt(asked.rows)] == [
        "0.png",
        "1.png",
        "odd0.png",
        "odd1.png",
        "odd2.png",
    ]
    for kind, rows in report.by_expected(asked.rows).items():
        checks.check(
            kind, holds=all(one.right for one in rows), found=[one.sample.name for one in rows if not one.right]
        )
    assert story.summarize(asked, checks) == 1
    assert "odd2.png" in capsys.readouterr().out


def test_the_demo_passes_when_all_checks_do() -> None:
    checks = Checks()
    checks.check("sky", holds=True)
    assert story.summarize(Asked(in_bundles=[row("a", says="txt")], took_s=1.0), checks) == 0


def test_a_batch_that_many_jobs_see_is_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(str(number), says="txt", rows=4) for number in range(8)] + [row("last", says="txt", rows=1)]
    report.print_histogram(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[::3] == ["1", "1"]
    assert lines[1].split()[::3] == ["4", "2"]
    assert report.mean_batch_rows(rows) == pytest.approx(3.0)
