"""What the commands that try one model file share."""

import argparse
import threading

import pytest

from inferq.commands import CommandError
from inferq_worker.inspection.arguments import add_common_arguments, count, seconds, trial_settings, within
from inferq_worker.runtime.interface import ModelRefused, RunFailed, RuntimeUnavailable, SessionBroken


def raising(error: Exception) -> None:
    raise error


def test_the_answer_of_the_task_comes_back() -> None:
    assert within(10.0, lambda: 7, "m.onnx") == 7


def test_a_task_that_does_not_end_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(CommandError, match=r"m.onnx was not done after 0.01 s; give it more time with --limit"):
        within(0.01, never.wait, "m.onnx")
    never.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelRefused("m.onnx is empty"), "m.onnx is empty"),
        (RuntimeUnavailable("not installed"), "not installed"),
        (RunFailed("out_of_memory", "no memory"), "m.onnx: no memory"),
        (SessionBroken("the device failed"), "m.onnx: the device failed"),
    ],
)
def test_what_the_runtime_says_is_said_to_people(error: Exception, message: str) -> None:
    with pytest.raises(CommandError) as raised:
        within(10.0, lambda: raising(error), "m.onnx")
    assert str(raised.value) == message


def test_a_fault_of_ours_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 / 0, "m.onnx")


def test_the_provider_of_the_command_line_yields_to_set() -> None:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    args = parser.parse_args(["m.onnx", "--provider", "tensorrt"])
    args.config, args.set = None, ["runtime.device_id=3"]
    runtime = trial_settings(args).runtime
    assert (runtime.provider, runtime.device_id) == ("tensorrt", 3)


@pytest.mark.parametrize("text", ["0", "-1", "65537"])
def test_a_count_has_bounds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan"])
def test_seconds_are_finite_and_above_0(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        seconds(text)
