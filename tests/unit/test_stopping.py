"""Signals to a command that has something to bring to safety; in a process of its own, because signals are."""

import signal
import subprocess
import sys

import pytest

COMMAND = """
import asyncio, sys
from inferq.commands.stopping import Stop

def say(text):
    print(text, flush=True)

async def work():
    try:
        say("working")
        await asyncio.Event().wait()
    finally:
        say("cleaning")
        if "stuck" in sys.argv:
            await asyncio.Event().wait()

stop = Stop(lambda: say("leaving"))
stop.run(work())
say("ended")
sys.exit(stop.status)
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_lets_it_clean_up(number: signal.Signals, status: int) -> None:
    with started() as process:
        assert line(process) == "working"
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)

    assert (output, errors, process.returncode) == ("cleaning\nended\n", "", status)


def test_the_second_signal_ends_it_at_once_and_says_nothing() -> None:
    with started("stuck") as process:
        assert line(process) == "working"
        process.send_signal(signal.SIGINT)
        assert line(process) == "cleaning"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=10)

    assert (output, errors, process.returncode) == ("leaving\n", "", 130)
