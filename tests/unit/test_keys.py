from inferq.keys import done_channel, input_key, output_key, paused_key, result_key


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
