"""The frame of the command line, with commands made for the test."""

import argparse
import json
import os
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from inferq import cli
from inferq.amqp import BrokerUnreachable, Unroutable
from inferq.commands import CommandError, add_command
from inferq.configuration import ConfigurationError
from inferq.management import ManagementError

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts a command `try` with an option into the command line."""

    def install(func: Run) -> None:
        def register(subparsers: Any) -> None:
            parser = add_command(subparsers, "try", summary="tries", description="Tries it.", examples="inferq try 1")
            parser.add_argument("words", nargs="*")
            parser.set_defaults(func=func)

        module = types.ModuleType("inferq_test_command")
        module.register = register  # type: ignore[attr-defined]  # made here
        monkeypatch.setitem(sys.modules, "inferq_test_command", module)
        found = {**cli.OWN_COMMANDS, "try": "inferq_test_command:register"}
        monkeypatch.setattr(cli, "find_commands", lambda: found)

    return install


def raising(error: BaseException) -> Run:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


def test_our_table_of_commands_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(cli.OWN_COMMANDS) == project["entry-points"][cli.GROUP]
    assert project["scripts"] == {"inferq": "inferq.cli:main"}


def test_every_command_of_ours_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.OWN_COMMANDS:
        assert f"\n    {name} " in text
        assert cli._SUMMARIES[name].split()[0] in text


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from inferq.cli import main; main(['--help']);"
        "assert not {'inferq_worker', 'aio_pika', 'numpy', 'inferq.commands.topology'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_status_of_the_command_is_the_exit_status(command: Callable[[Run], None]) -> None:
    command(lambda _args: 7)
    assert cli.main(["try"]) == 7


@pytest.mark.parametrize(
    "line",
    [
        ["--config", "f.toml", "--set", "a.b=1", "--set", "c.d=2", "try", "x"],
        ["try", "x", "--config", "f.toml", "--set", "a.b=1", "--set", "c.d=2"],
        ["--set", "a.b=1", "try", "--set", "c.d=2", "x", "--config=f.toml"],
    ],
)
def test_configuration_options_stand_before_or_after_the_command(
    line: list[str], command: Callable[[Run], None]
) -> None:
    seen: list[argparse.Namespace] = []

    def note(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    command(note)
    assert cli.main(line) == 0
    assert (seen[0].config, seen[0].set, seen[0].words) == (Path("f.toml"), ["a.b=1", "c.d=2"], ["x"])


def test_after_two_dashes_everything_belongs_to_the_command(command: Callable[[Run], None]) -> None:
    seen: list[argparse.Namespace] = []

    def note(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    command(note)
    assert cli.main(["try", "--", "--set", "x"]) == 0
    assert seen[0].words == ["--set", "x"]
    assert seen[0].set == []


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("knob x is bad"),
        CommandError("cannot do x"),
        ManagementError("cannot ask"),
        BrokerUnreachable("cannot reach"),
        Unroutable("no queue"),
    ],
)
def test_an_error_for_people_is_one_message_and_status_2(
    error: Exception, command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.main(["try"]) == 2
    assert capsys.readouterr() == ("", f"inferq: {error}\n")


def test_a_fault_of_ours_keeps_its_traceback(command: Callable[[Run], None]) -> None:
    command(raising(RuntimeError("bug")))
    with pytest.raises(RuntimeError, match="bug"):
        cli.main(["try"])


def test_ctrl_c_ends_with_130_and_no_words(command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_missing_extra_says_what_to_install(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")))
    assert cli.main(["try"]) == 2
    assert "pip install 'inferq[worker]' (GPU) or 'inferq[worker-cpu]'" in capsys.readouterr().err


def test_a_missing_module_of_ours_is_a_fault(command: Callable[[Run], None]) -> None:
    command(raising(ModuleNotFoundError("No module named 'inferq_worker.nope'", name="inferq_worker.nope")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])


def test_a_missing_extra_is_explained_when_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_command: object) -> None:
        raise ModuleNotFoundError("No module named 'structlog'", name="structlog")

    monkeypatch.setattr(cli._Command, "load", missing)
    assert cli.main(["worker"]) == 2
    assert "`inferq worker` needs the worker extra" in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["nope"]) == 2
    assert "topology" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["nope"], "see `inferq --help`"),
        (["submit"], "inferq submit: the following arguments are required: FILE, --model; see `inferq submit --help`"),
        (["topology", "chek"], "see `inferq topology --help`"),
        (["topology", "check", "--modell", "m"], "see `inferq --help`"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(f"{said}\n")
    assert shown.err.count("\n") == 1


def test_the_frame_imports_nothing_slow_so_that_an_early_interrupt_meets_main() -> None:
    code = "import sys; import inferq.cli; assert not {'pydantic', 'numpy', 'importlib.metadata'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False, env=_import_path()).returncode == 0


def _import_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["FOLDER"], "is a directory; name the .jsonl or .npz files in it"),
        (["x.npy"], "numpy.savez"),
        (["m.onnx"], "inferq worker --model"),
        (["a.xlsx"], "jobs come as .jsonl (a JSON object a line) or .npz, not as .xlsx"),
        (["a.jsonl"], "a.jsonl: No such file or directory"),
        (["-", "--output", "out.csv"], "answers are written as .jsonl or .npz, not as .csv"),
        (["-", "--output", "FOLDER"], "is a directory; name a .jsonl or .npz file in it"),
        (["-", "--output", "nowhere/out.npz"], "there is no directory nowhere"),
        (["in.jsonl", "--output", "in.jsonl"], "is also an input, which it would overwrite"),
        (["-", "--lane", "Bulk"], "'Bulk' is no lane name"),
        (["-", "--model", "a.b"], "'a.b' is no model name"),
        (["-", "--checkpoint", "nowhere/c"], "--checkpoint cannot go on in standard input"),
        (["in.jsonl", "--output", "out.jsonl", "--checkpoint", "nowhere/c"], "nowhere/c: No such file or directory"),
    ],
)
def test_what_submit_cannot_read_or_write_is_said_before_anything_is_sent(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"x": [[1]]}\n')
    line = [str(tmp_path) if word == "FOLDER" else word for word in words]

    assert cli.main(["submit", "--model", "m", *line]) == 2

    errors = capsys.readouterr().err
    assert errors.startswith("inferq: ")
    assert said in errors
    assert errors.count("\n") == 1
    assert (tmp_path / "in.jsonl").read_text() == '{"x": [[1]]}\n'


def test_each_command_shows_description_and_examples(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda _args: 0)
    assert cli.main(["try", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Tries it." in text
    assert "examples:\n  inferq try 1" in text


@pytest.mark.parametrize("action", ["apply", "check", "export", "add-model", "remove-model"])
def test_each_action_of_topology_has_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", action, "--help"]) == 0
    assert f"usage: inferq topology {action}" in capsys.readouterr().out


def test_python_dash_m_inferq_works_and_prints_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "inferq", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("inferq ")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_early_causes_no_complaint(lines: int) -> None:
    """One line is still in the buffer when the command ends; many break the pipe while it prints."""
    code = (
        "import sys; import inferq.cli as cli\n"
        f"cli._run = lambda argv: sys.stdin.read() or [print('x' * 50) for _ in range({lines})] and 0\n"
        "sys.exit(cli.main())"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=buffered) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        program.stdin.close()
        assert program.stderr.read() == ""
        assert program.wait(timeout=10) == 141


def test_topology_export_prints_definitions_without_a_broker(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["topology", "export", "--model", "m", "--set", "topology.models.n.lanes=only"]
    assert cli.main([*line, "--set", "broker.url=amqp://127.0.0.1:1/some%2Fhost"]) == 0
    content = json.loads(capsys.readouterr().out)
    names = {queue["name"] for queue in content["queues"]}
    assert {"inferq.m.interactive", "inferq.m.fallback", "inferq.n.only", "inferq.dead"} <= names
    assert content["vhosts"] == [{"name": "some/host"}]


@pytest.mark.parametrize("name", ["Bad", "a.b", ""])
def test_an_impossible_model_name_is_refused_before_the_broker_is_asked(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["topology", "add-model", name, "--set", "broker.url=amqp://127.0.0.1:1/"]) == 2
    assert f"inferq: {name!r} is no model name: use small letters" in capsys.readouterr().err
