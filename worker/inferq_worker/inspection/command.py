"""`inferq model inspect`: what a person types, and what comes back."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from inferq.commands import add_command
from inferq_worker.inspection.arguments import add_common_arguments, count, model_at, seconds, trial_settings, within
from inferq_worker.inspection.examine import Limits, describe, examine
from inferq_worker.inspection.report import as_json, as_text

if TYPE_CHECKING:
    import argparse

    from inferq.commands import Subparsers

_DESCRIPTION = """\
Looks at .onnx files."""
_INSPECT = """\
Says what a file takes and gives, whether its rows can be batched and what that was judged by, how fast it runs on this
machine, and which model.toml to serve it with. It is judged as a worker would: with the model.toml beside it and the
runtime settings of the configuration (provider, threads).

The file is loaded and run with made-up inputs, unless --no-run. A file with EPContext nodes is native code: it is never
loaded, unless --set runtime.trust_models=true.

Exit status: 0 if a worker serves the file as it stands (with --no-run: if it is an ONNX model), 1 if it would refuse
it, 2 if there is no ONNX model that this ONNX Runtime can read."""
_EXAMPLES = """\
inferq model inspect resnet50.onnx
inferq model inspect models/texts/3/model.onnx --provider cpu --max-rows 128 --dim sequence=256
inferq model inspect unknown.onnx --no-run
inferq model inspect resnet50.onnx --json | jq .warnings"""


def register(subparsers: Subparsers) -> None:
    """Add `inferq model` and its actions."""
    parser = add_command(
        subparsers,
        "model",
        summary="look at .onnx files before they are served",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    inspect = add_command(
        actions,
        "inspect",
        summary="inputs, batch axis, run times, warnings",
        description=_INSPECT,
        examples=_EXAMPLES,
    )
    add_common_arguments(inspect)
    inspect.add_argument("--no-run", action="store_true", help="read the file only: do not load it, do not run it")
    inspect.add_argument(
        "--max-rows", type=count, default=64, metavar="N", help="largest batch to time (default %(default)s)"
    )
    inspect.add_argument(
        "--time", type=seconds, default=20.0, metavar="S", help="seconds for all run times (default %(default)g)"
    )
    inspect.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Inspect one file and print what was found."""
    settings = trial_settings(args)
    model = model_at(args.file)
    limits = Limits(args.max_rows, settings.batching.max_rows, args.time, dict(args.dim))
    task = partial(describe, model) if args.no_run else partial(examine, model, settings.runtime, limits)
    found = within(args.limit, task, args.file)
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 1 if found.problem else 0
