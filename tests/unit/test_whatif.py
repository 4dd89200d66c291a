"""`inferq whatif`: what is typed, what is simulated, what is printed and drawn."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from inferq import cli
from inferq.commands import CommandError
from inferq_worker.scheduling.traces import Arrival
from inferq_worker.whatif import latencies
from inferq_worker.whatif.cases import Case, parse_case
from inferq_worker.whatif.latencies import fetch_latency, parse_latency
from inferq_worker.whatif.plot import svg
from inferq_worker.whatif.recorded import read_trace
from inferq_worker.whatif.report import Outcome

if TYPE_CHECKING:
    from pathlib import Path

HEADINGS = [
    "jobs/s",
    "case",
    "goodput",
    "bound",
    "p50",
    "ms",
    "p95",
    "ms",
    "p99",
    "ms",
    "rows",
    "busy",
    "cpu",
    "dropped",
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def whatif(*words: str) -> int:
    return cli.main(["whatif", "--jobs", "400", *words])


def outcomes(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert whatif("--json", *words) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["outcomes"]
    return found


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert whatif(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


# The command


def test_without_arguments_both_policies_are_compared_from_half_load_to_overload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert whatif() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs of 5 ms + 0.5 ms a row; about 400 jobs at each rate"
    assert lines[2].split() == HEADINGS
    assert [line.split()[:2] for line in lines[3:5]] == [["762", "earliest_deadline"], ["762", "size_or_timeout"]]
    assert "batches by rows" in lines[18]


def test_overload_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    ours, plain = outcomes(capsys, "--jobs", "6000", "--rate", "1700")
    assert (ours["case"], plain["case"]) == ("earliest_deadline", "size_or_timeout")
    assert ours["goodput"] > 0.88
    assert plain["goodput"] < 0.4
    assert ours["bound"] == pytest.approx(32 / 0.021 / 1_700)
    assert sum(ours["dropped_share"].values()) + ours["late_share"] + ours["goodput"] == pytest.approx(1.0)
    assert sum(ours["batch_share"].values()) == pytest.approx(1.0)
    assert 0 < ours["latency_ms"]["p50"] <= ours["latency_ms"]["p95"] <= ours["latency_ms"]["p99"] <= 50.0


def test_cases_and_rates_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--jobs", "2000", "--rate", "100", "--rate", "3000", "--deadline", "0.2")
    found = outcomes(capsys, *words, "--case", "alone:", "--case", "helped: cpu_lanes=8 cpu_run_s=0.025")
    assert [(one["offered_per_s"], one["case"]) for one in found] == [
        (100.0, "alone"),
        (100.0, "helped"),
        (3000.0, "alone"),
        (3000.0, "helped"),
    ]
    assert [one["cpu_share"] > 0 for one in found] == [False, False, False, True]


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "1500", "--deadline", "0.04,0.2", "--rows", "1,3", "--shapes", "2", "--bursty", "--case")
    first = outcomes(capsys, *words, "noisy: spread=0.2")
    assert outcomes(capsys, *words, "noisy: spread=0.2") == first
    assert outcomes(capsys, "--seed", "2", *words, "noisy: spread=0.2") != first


def test_lanes_are_told_apart_where_there_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif("--rate", "500", "--bulk-rate", "500") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[3:5] == ["urgent", "bulk"]
    assert lines[3].split()[:5] == ["1,000", "earliest_deadline", "100.0%", "100.0%", "100.0%"]


def test_limits_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "inferq.toml").write_text('[batching]\nmax_rows = 4\n[broker]\nurl = "amqp://nowhere/"\n')
    configured, changed = outcomes(capsys, "--rate", "3000", "--case", "as is:", "--case", "changed: max_rows=8")
    assert [max(map(int, one["batch_share"])) for one in (configured, changed)] == [4, 8]
    assert outcomes(capsys, "--set", "batching.max_rows=2", "--rate", "3000")[0]["mean_batch_rows"] <= 2


def test_a_recorded_trace_is_replayed_and_made_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = ["at_s,deadline_s,rows,lane", *(f"{100 + number / 100},0.05,1,interactive" for number in range(101))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    found = outcomes(capsys, "--trace", "trace.csv", "--speed", "1", "--speed", "90", "--case", "one:")
    assert [one["offered_per_s"] for one in found] == pytest.approx([101.0, 9090.0])
    assert [one["jobs"] for one in found] == [101, 101]
    assert found[0]["goodput"] == 1.0
    assert found[1]["goodput"] < 1.0


def test_goodput_is_drawn_under_the_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = ("--case", "a<b & c:", "--case", "plain: policy=size_or_timeout")
    assert whatif("--rate", "800", "--rate", "2000", *cases, "--plot", "goodput.svg") == 0
    capsys.readouterr()
    root = ET.parse(tmp_path / "goodput.svg").getroot()  # noqa: S314 - written a line above
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [62, 2, 2], "the bound with its corner, and each case"
    dots = {float(dot.get("r", "")) for dot in root.iter(f"{SVG}circle")}
    assert dots == {4.5, 3.0}, "what another case covers shows as a ring"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"bound", "a<b & c", "plain", "100 %", "0 %", "2,000"} <= set(texts)
    for points in lines:
        for point in points:
            x, y = map(float, point.split(","))
            assert 64 <= x <= 736
            assert 40 <= y <= 384


def test_a_title_too_long_for_the_drawing_is_cut_and_told_whole_to_who_points_at_it() -> None:
    outcome = Outcome("a", 1.0, 1, 1.0, 1.0, None, None, {}, 1.0, 1.0, 0.0, 0.0, {}, {})
    root = ET.fromstring(svg([outcome], "x" * 200))  # noqa: S314 - drawn here
    assert root.findtext(f"{SVG}title") == "x" * 200
    assert root.findtext(f"{SVG}text") == "x" * 83 + "\N{HORIZONTAL ELLIPSIS}"


def test_the_help_shows_every_knob_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["whatif", "--help"]) == 0
    text = capsys.readouterr().out
    for knob in Case.__dataclass_fields__:
        assert knob == "name" or f"\n  {knob} " in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--case", "narrow"], 'say "NAME: KNOB=VALUE ..."'),
        (["--case", "x: max_row=3"], "there is no 'max_row'; knobs are policy, max_rows"),
        (["--case", "x: max_rows=many"], "max_rows is a whole number, not 'many'"),
        (["--case", "x: max_rows=0"], "max_rows is 1 to 65536"),
        (["--case", "x: max_wait_s=-1"], "max_wait_s is at least 0"),
        (["--case", "x: margin_s=nan"], "margin_s is at least 0"),
        (["--case", "x: admit=perhaps"], "admit is yes or no"),
        (["--case", "x: policy=random"], "policy is one of earliest_deadline, size_or_timeout"),
        (["--case", "x: cpu_lanes=2"], "cpu_lanes need cpu_run_s"),
        (["--case", "x: spread=1"], "spread is at least 0 and below 1"),
        (["--case", "x:", "--case", "x: max_rows=1"], "two --case have the same name"),
        (["--speed", "2"], "--speed goes with --trace"),
        (["--jobs", "0"], "at least 1"),
        (["--trace", "none.csv"], "cannot read the trace none.csv"),
        (["--trace", "none.csv", "--rate", "1"], "has its own rate"),
        (["--plot", "no/such/folder.svg"], "cannot write no/such/folder.svg"),
        (["--latency", "fast"], "say linear:MS:MS_PER_ROW"),
        (["--latency-from", "none.json"], "cannot read none.json"),
    ],
)
def test_what_cannot_be_done_is_said(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert expected in complaint(capsys, *words)


@pytest.mark.parametrize("words", [["--rate", "0"], ["--deadline", "soon"], ["--rows", "0"], ["--deadline", "-1"]])
def test_impossible_numbers_are_refused_where_they_stand(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert f"argument {words[0]}" in complaint(capsys, *words)


# Latencies


def test_a_line_and_a_table_say_how_long_runs_are() -> None:
    assert [parse_latency("linear:5:0.5").run_s(rows) for rows in (1, 40)] == pytest.approx([0.0055, 0.025])
    assert [parse_latency("table:1=5.5,8=9,32=21").run_s(rows) for rows in (1, 20, 32)] == pytest.approx(
        [0.0055, 0.015, 0.021]
    )
    assert parse_latency("table:1=4,2=5,8=40").rows_per_s(8) == pytest.approx(400.0), "not the largest batch is best"


@pytest.mark.parametrize(
    "text", ["", "linear:5", "linear:0:0", "linear:-1:3", "table:", "table:1", "table:0=3", "table:1=0", "steps:1"]
)
def test_any_other_latency_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="linear:MS"):
        parse_latency(text)


STATUS = {"models": {"a": {"run_ms_by_rows": {"1": 4.0, "8": 8.0}}, "new": {"run_ms_by_rows": {}}}}


def test_what_a_worker_measured_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    latency = fetch_latency("status.json", "a")
    assert latency.run_s(8) == pytest.approx(0.008)
    assert latency.label == "a, 1=4 ms, 8=8 ms"


def test_what_a_worker_measured_is_read_from_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(url: str) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(json.dumps(STATUS).encode())

    monkeypatch.setattr(latencies, "_open", answer)
    assert fetch_latency("http://127.0.0.1:9180/status", "a").run_s(1) == pytest.approx(0.004)
    assert asked == ["http://127.0.0.1:9180/status"]


@pytest.mark.parametrize(
    ("status", "model", "expected"),
    [
        (STATUS, None, "has the models a, new: choose one with --model"),
        (STATUS, "b", "has no model 'b', but a, new"),
        (STATUS, "new", "has not measured any run of 'new' yet"),
        ({"models": {}}, None, r"has the models \(none\)"),
        ({"status": "ok"}, None, "is not the /status of a worker"),
        ({"models": {"a": {"run_ms_by_rows": {"one": 1}}}}, None, "is not rows to milliseconds"),
    ],
)
def test_a_status_without_what_is_needed_is_refused(
    tmp_path: Path, status: object, model: str | None, expected: str
) -> None:
    (tmp_path / "status.json").write_text(json.dumps(status))
    with pytest.raises(CommandError, match=expected):
        fetch_latency("status.json", model)


# Recorded traces


def test_json_lines_are_read_sorted_and_begin_at_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 1700000001.5, "lane": "bulk", "rows": 3}\n\n{"at_s": 1700000000.0, "deadline_s": 0.2}\n')
    assert read_trace(path) == [Arrival(0.0, 0.2), Arrival(1.5, None, 3, 1)]


def test_csv_is_read_with_empty_fields_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.CSV"
    path.write_text("at_s,deadline_s,lane\n5,,0\n6.5,0.1,1\n")
    assert read_trace(path) == [Arrival(0.0), Arrival(1.5, 0.1, 1, 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no jobs"),
        ('{"at_s": 1}\n{"at_s": ', "line 2: not JSON"),
        ('{"at": 1}', "line 1: a job has at_s"),
        ('{"at_s": 1, "colour": "red"}', "line 1: a job has at_s"),
        ("[1]", "line 1: a job has at_s"),
        ('{"at_s": "noon"}', "line 1: could not convert"),
        ('{"at_s": 1, "rows": 0}', "line 1: a job has at least one row"),
        ('{"at_s": 1, "deadline_s": "inf"}', "line 1: times are finite"),
    ],
)
def test_a_line_that_is_no_job_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=expected):
        read_trace(path)


def test_a_case_changes_what_it_names_and_nothing_else() -> None:
    base = Case("base", max_rows=7)
    assert parse_case("mine: window_jobs=3, admit=no", base) == Case("mine", max_rows=7, window_jobs=3, admit=False)
