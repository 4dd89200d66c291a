"""Tables for people."""

from inferq_worker.columns import aligned


def test_words_stand_left_and_figures_right_under_their_headings() -> None:
    lines = [{"name": "Conv", "ms": "12.5"}, {"name": "MatMul", "ms": "3.0"}]
    assert aligned(["name", "ms"], lines, left={"name"}).split("\n") == [
        "name      ms",
        "Conv    12.5",
        "MatMul   3.0",
    ]


def test_no_line_ends_in_blanks_and_all_are_indented() -> None:
    assert aligned(["a", "b"], [{"a": "1", "b": ""}], left={"b"}, indent="  ").split("\n") == ["  a  b", "  1"]


def test_a_table_without_lines_is_its_headings() -> None:
    assert aligned(["rows", "ms"], []) == "rows  ms"
