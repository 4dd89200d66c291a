import pytest

from inferq.keys import done_channel, input_key, is_at, output_key, paused_key, result_key


def test_all_names_of_a_job_share_one_hash_slot() -> None:
    names = [
        result_key("p", "job-1"),
        done_channel("p", "job-1"),
        input_key("p", "job-1", "x"),
        output_key("p", "job-1", "x"),
    ]

    assert {name[name.index("{") : name.index("}") + 1] for name in names} == {"{job-1}"}
    assert len(set(names)) == 4


def test_the_names_are_those_of_the_design() -> None:
    assert result_key("inferq", "a") == "inferq:{a}:result"
    assert done_channel("inferq", "a") == "inferq:{a}:done"
    assert input_key("inferq", "a", "x") == "inferq:{a}:in:x"
    assert output_key("inferq", "a", "y") == "inferq:{a}:out:y"
    assert paused_key("inferq") == "inferq:paused"


MARK = "0123456789abcdef" * 2


@pytest.mark.parametrize("ref", ["p:{a}:in:x", f"p:{{a}}:in:x:{MARK}"])
def test_a_reference_is_the_key_with_a_mark_or_without(ref: str) -> None:
    assert is_at(ref, input_key("p", "a", "x"))
    assert input_key("p", "a", "x", MARK) == f"p:{{a}}:in:x:{MARK}"


@pytest.mark.parametrize(
    "ref",
    [
        None,
        "",
        "p:{a}:in:",
        "p:{a}:in:xy",
        "p:{b}:in:x",
        f"p:{{a}}:in:x{MARK}",
        f"p:{{a}}:in:x:{MARK}0",
        f"p:{{a}}:in:x:{MARK}\n",
        f"p:{{a}}:in:x:{MARK[:-1]}G",
        f"p:{{a}}:in:y:{MARK}",
    ],
)
def test_no_other_reference_is_at_that_key(ref: str | None) -> None:
    assert not is_at(ref, input_key("p", "a", "x"))
