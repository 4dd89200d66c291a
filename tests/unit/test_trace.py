"""A profile as ONNX Runtime writes it, summed up. The events here are made by hand, in microseconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from inferq_worker.profiling.trace import NotAProfile, Profile, read_profile

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def kernel(name: str, operator: str, start: int, took: int, provider: str = CPU, thread: int = 1) -> dict[str, Any]:
    args = {"op_name": operator, "provider": provider, "output_type_shape": [{"float": [8, 4]}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "tid": thread, "ts": start, "dur": took, "args": args}


def session(name: str, start: int, took: int, thread: int = 1) -> dict[str, Any]:
    return {"cat": "Session", "name": name, "tid": thread, "ts": start, "dur": took, "args": {}}


def run(start: int, took: int) -> list[dict[str, Any]]:
    return [session("model_run", start, took), session("SequentialExecutor::Execute", start + 1, took - 2)]


def read(tmp_path: Path, *events: dict[str, Any], skip_runs: int = 0) -> Profile:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    return read_profile(path, skip_runs=skip_runs)


def own_ms(profile: Profile) -> dict[str, float]:
    return {cost.name: round(1000 * cost.own_s, 6) for cost in profile.operators}


def test_operators_are_summed_over_nodes_and_runs_the_dearest_first(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("a", "Add", 5, 10), kernel("c", "Conv", 20, 60)]
    events += [*run(200, 100), kernel("a", "Add", 205, 10), kernel("c", "Conv", 220, 20), kernel("b", "Add", 250, 20)]
    found = read(tmp_path, session("model_loading_uri", 0, 9), *events)
    assert found.runs == 2
    assert found.run_s == pytest.approx(200e-6)
    assert found.kernels_s == pytest.approx(120e-6)
    conv, add = found.operators
    assert (conv.name, conv.nodes, conv.executions) == ("Conv", 1, 2)
    assert conv.share == pytest.approx(80 / 120)
    assert (add.name, add.nodes, add.executions) == ("Add", 2, 3)
    assert add.own_s == pytest.approx(40e-6)
    assert [cost.name for cost in found.nodes] == ["c", "a", "b"]
    assert found.nodes[0].shapes == "float [8, 4]"


def test_warm_up_runs_are_left_out(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("a", "Add", 5, 90), *run(200, 50), kernel("a", "Add", 205, 40)]
    found = read(tmp_path, *events, skip_runs=1)
    assert found.runs == 1
    assert own_ms(found) == {"Add": 0.04}


def test_what_runs_inside_of_a_loop_is_not_counted_twice(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("l", "Loop", 10, 80)]
    for start in (12, 50):
        events += [session("SequentialExecutor::Execute", start, 30), kernel("m", "MatMul", start + 1, 25)]
    assert own_ms(read(tmp_path, *events)) == {"MatMul": 0.05, "Loop": 0.03}


def test_a_loop_in_a_loop_gives_each_its_own_time(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("outer", "Loop", 10, 80), session("SequentialExecutor::Execute", 11, 70)]
    events += [
        kernel("inner", "If", 12, 60),
        session("SequentialExecutor::Execute", 13, 50),
        kernel("a", "Add", 15, 40),
    ]
    assert own_ms(read(tmp_path, *events)) == {"Add": 0.04, "If": 0.02, "Loop": 0.02}


def test_neighbours_that_rounding_makes_overlap_stay_apart(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("a", "Add", 10, 5), kernel("m", "Mul", 14, 1), kernel("s", "Sub", 15, 0)]
    assert own_ms(read(tmp_path, *events)) == {"Add": 0.005, "Mul": 0.001, "Sub": 0.0}


def test_kernels_of_other_threads_are_not_inside(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("l", "Loop", 10, 80), kernel("m", "MatMul", 20, 30, thread=2)]
    assert own_ms(read(tmp_path, *events)) == {"Loop": 0.08, "MatMul": 0.03}


def test_an_operator_on_two_providers_has_two_lines(tmp_path: Path) -> None:
    events = [*run(0, 100), kernel("a", "Add", 10, 5, CUDA), kernel("b", "Add", 20, 7)]
    found = read(tmp_path, *events).operators
    assert [(cost.provider, cost.executions) for cost in found] == [(CPU, 1), (CUDA, 1)]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"name": "model_run"}]'])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(NotAProfile, match=r"trace\.json"):
        read_profile(path, skip_runs=0)


def test_a_profile_without_the_counted_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAProfile, match="holds 1 runs"):
        read(tmp_path, *run(0, 100), skip_runs=1)
