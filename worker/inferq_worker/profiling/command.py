"""`inferq profile`: what a person types, and what comes back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from inferq.commands import CommandError, add_command
from inferq_worker.inspection.arguments import add_common_arguments, count, model_at, trial_settings, within
from inferq_worker.profiling.measure import Measured, Wish, measure
from inferq_worker.profiling.report import as_json, as_text
from inferq_worker.profiling.trace import NotAProfile

if TYPE_CHECKING:
    import argparse

    from inferq.commands import Subparsers
    from inferq_worker.runtime.settings import RuntimeSettings

_DESCRIPTION = """\
Runs a model with made-up inputs under ONNX Runtime's own profiler, sums the time up by operator and by node, and leaves
the profile as a Chrome trace. Two runs before the counted ones warm it up; the trace has them, the tables do not.

Provider and threads are those of the configuration. A file with EPContext nodes is native code: it is never loaded,
unless --set runtime.trust_models=true."""
_EXAMPLES = """\
inferq profile resnet50.onnx
inferq profile resnet50.onnx --rows 32 --runs 50 --provider cuda --out traces
inferq profile bert.onnx --rows 8 --dim sequence=128
inferq profile resnet50.onnx --json | jq '.operators[0]'"""


def register(subparsers: Subparsers) -> None:
    """Add `inferq profile`."""
    parser = add_command(
        subparsers,
        "profile",
        summary="find out where the time of a model's runs goes",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    add_common_arguments(parser)
    parser.add_argument("--rows", type=count, default=1, metavar="N", help="rows of each run (default %(default)s)")
    parser.add_argument("--runs", type=count, default=20, metavar="N", help="counted runs (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="where the trace goes (default: the current folder)"
    )
    parser.add_argument("--top", type=count, default=10, metavar="N", help="nodes to list (default %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Profile one file and print where its time went."""
    runtime = trial_settings(args).runtime
    path = model_at(args.file).path
    wish = Wish(args.rows, args.runs, dict(args.dim))
    measured = within(args.limit, partial(_measure, path, runtime, wish, args.out), args.file)
    print(json.dumps(as_json(measured), indent=2) if args.json else as_text(measured, top=args.top))
    return 0


def _measure(path: Path, runtime: RuntimeSettings, wish: Wish, folder: Path) -> Measured:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        return measure(path, runtime, wish, folder)
    except NotAProfile as error:
        raise CommandError(str(error)) from error
