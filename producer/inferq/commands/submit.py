"""`inferq submit`: sends the jobs of files and writes their answers. Here is what a person types and reads."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferq.checkpoint import Checkpoint
from inferq.client import Client
from inferq.commands import CommandError, add_command, settings_of, speak_in_lines
from inferq.commands.paths import check_input, check_output
from inferq.commands.reconciling import Reconciliation, report
from inferq.commands.stopping import Stop
from inferq.errors import InferqError
from inferq.names import lane_problem, model_problem
from inferq.outputs import open_output
from inferq.progress import Progress, duration, jobs
from inferq.records import InputError, Reading
from inferq.settings import ClientSettings
from inferq.sources import STDIN, Sources
from inferq.stall import tell_when_stalled, why_nothing_comes
from inferq.submission import Submission, Tally
from inferq_schemas import DTYPES, lane_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferq.commands import Subparsers

__all__ = ["register"]

_DESCRIPTION = """\
Sends the jobs of files to a model and writes the answers.

A file is an .npz archive, whose rows (axis 0) are the jobs, or JSON lines, one job a line:

  {"x": [[5.1, 3.5, 1.4, 0.2]]}
  {"inputs": {"x": [[5.1, 3.5, 1.4, 0.2]]}, "id": "flower-1", "params": {"top_k": 3}, "deadline_s": 60}
  {"x": {"dtype": "uint8", "shape": [1, 4], "data_base64": "AQIDBA=="}}

The first axis is the batch: a job is one row or several. JSON has one kind of number. An input whose numbers are all
whole becomes int64. Once one of them has a fraction (also as in 1.0), all numbers of that input are float32, whole ones
too, for the rest of the run; the first lines of a file are looked at before anything is sent. --dtype NAME=DTYPE
decides it for good. An .npz keeps its dtypes.

Files are read as answers come, so their size does not matter. Answers are JSON lines in order of completion ("index" is
the number of the record, from 0), or an .npz in the order of the jobs, with job_index, and failed_index, failed_id,
failed_code and failed_message if jobs failed. A line that is no job fails alone (invalid_input), unless --strict.

After a run that broke off, or in doubt, --reconcile accounts for every record: answered before, fetched now from
Redis, parked (with the reason), or unknown.

Exit status: 0 all answered, 1 some failed, 2 nothing could be done, 130 or 143 stopped by a signal. With --reconcile:
0 all answered, 1 all accounted for, some failed or parked, 3 some unknown."""
_EXAMPLES = """\
inferq submit --model iris flowers.jsonl > answers.jsonl
inferq submit --model resnet50 images.npz --rows-per-job 8 --output logits.npz
inferq submit --model bert texts.jsonl --output answers.jsonl --checkpoint answers.ckpt   # again: goes on
inferq submit --model bert texts.jsonl --output answers.jsonl --checkpoint answers.ckpt --reconcile
echo '{"x": [[5.1, 3.5, 1.4, 0.2]]}' | inferq submit --model iris --lane interactive -"""


def register(subparsers: Subparsers) -> None:
    """Add `inferq submit`."""
    parser = add_command(
        subparsers,
        "submit",
        summary="send jobs and wait for their answers",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help=".npz or JSON lines (.jsonl); - is standard input"
    )
    parser.add_argument("--model", required=True, help="name of the model")
    _input_options(parser.add_argument_group("input"))
    _output_options(parser.add_argument_group("output"))
    _job_options(parser.add_argument_group("jobs"))
    parser.set_defaults(func=_run)


def _input_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        action="append",
        default=[],
        type=_name_and_dtype,
        metavar="NAME=DTYPE",
        help="dtype of an input; may be given again",
    )
    group.add_argument(
        "--rows-per-job", type=_at_least_one, default=1, metavar="N", help="rows of one job of an .npz (default: 1)"
    )
    group.add_argument(
        "--add-batch-axis",
        action="store_true",
        help="each JSON line is one row without batch axis: [1, 2] for [[1, 2]]",
    )
    group.add_argument("--strict", action="store_true", help="stop at the first line that is no job")


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where answers go: NAME.npz, or NAME.jsonl (default: JSON lines to standard output)",
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="remember what is answered; the same command again goes on from there",
    )
    group.add_argument(
        "--reconcile",
        action="store_true",
        help="send nothing: say where each record of the run with this --checkpoint is, and fetch the answers that are "
        "stored and were not fetched",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _job_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lane", default="bulk", help="which of the model's queues (default: bulk)")
    group.add_argument(
        "--deadline", type=_above_zero, metavar="S", help="seconds each job may take (default: none in the bulk lane)"
    )
    group.add_argument("--bundle", type=_at_least_one, metavar="N", help="jobs a message (default: client.bundle_jobs)")
    group.add_argument("--window", type=_at_least_one, metavar="N", help="jobs under way (default: client.window_jobs)")
    group.add_argument("--model-version", metavar="VERSION", help="pin a version of the model")
    group.add_argument("--fallback", choices=["allow", "never"], default="allow", help="may the CPU answer?")
    group.add_argument("--late", choices=["drop", "serve"], default="drop", help="a job whose deadline cannot be met")
    group.add_argument("--force", action="store_true", help="run jobs again whose id has an outcome")


def _name_and_dtype(text: str) -> tuple[str, str]:
    name, _, dtype = text.rpartition("=")
    if not name or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DTYPE with a dtype of {', '.join(DTYPES)}")
    return name, dtype


def _at_least_one(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    speak_in_lines()
    with _errors_for_people(args):
        _check(args)
        sources = Sources(
            args.files, Reading(dict(args.dtype), args.add_batch_axis), args.rows_per_job, strict=args.strict
        )
        drawn = not (args.quiet or args.reconcile) and sys.stderr.isatty()
        progress = Progress(sys.stderr if drawn else None, share=sources.share, notes=sys.stderr)
        with contextlib.ExitStack() as files:
            checkpoint = None if args.checkpoint is None else _checkpoint(args, sources, files)
            output = files.enter_context(open_output(args.output, checkpoint))
            submission = files.enter_context(Submission(sources, output, progress, checkpoint))
            stop = Stop(files.close)
            if args.reconcile:
                return _reconcile(args, settings, submission, stop)
            files.callback(lambda: _tell(submission.tally, progress, args, stop))
            files.callback(progress.close)
            stop.run(_submit(args, settings, submission, progress))
    if sources.all_read and not progress.read:
        print("inferq: nothing to send: no file holds a job", file=sys.stderr)
    for name, dtype in sources.unused_dtypes().items():
        named = ", ".join(sources.input_names) or "none"
        print(f"inferq: --dtype {name}={dtype}: no record has an input {name!r}; inputs: {named}", file=sys.stderr)
    return (1 if submission.tally.failed else 0) if stop.status is None else stop.status


def _reconcile(args: argparse.Namespace, settings: ClientSettings, submission: Submission, stop: Stop) -> int:
    reconciliation = Reconciliation(settings, args.model, args.lane)
    stop.run(reconciliation.run(submission))
    if reconciliation.account is not None:
        skipped = submission.tally.skipped
        print("\n".join(report(reconciliation.account, before=skipped, waiting=reconciliation.waiting)))
    return reconciliation.status if stop.status is None else stop.status


def _check(args: argparse.Namespace) -> None:
    if args.files.count(STDIN) > 1:
        raise CommandError("standard input (-) can be read once only")
    for file in args.files:
        if file != STDIN:
            check_input(file)
    if args.output is not None:
        check_output(args.output, args.files)
    if problem := model_problem(args.model) or lane_problem(args.lane):
        raise CommandError(problem)
    if args.reconcile and (args.checkpoint is None or not args.checkpoint.is_file()):
        raise CommandError(
            "--reconcile needs the --checkpoint of a run that was begun, with the same files and options"
        )
    if args.checkpoint is None:
        return
    if STDIN in args.files:
        raise CommandError("--checkpoint cannot go on in standard input; write it to a file first")
    if args.output is None or args.output.suffix == ".npz":
        raise CommandError("--checkpoint needs --output with a file of JSON lines, to which a later run adds")


def _checkpoint(args: argparse.Namespace, sources: Sources, files: contextlib.ExitStack) -> Checkpoint:
    job = {
        "files": sources.identity(),
        "model": args.model,
        "model version": args.model_version,
        "rows per job": args.rows_per_job,
        "output": str(args.output),
    }
    return files.enter_context(Checkpoint(args.checkpoint, job))


async def _submit(
    args: argparse.Namespace, settings: ClientSettings, submission: Submission, progress: Progress
) -> None:
    options: dict[str, Any] = {
        "lane": args.lane,
        "deadline_s": args.deadline if args.deadline is not None or args.lane != "interactive" else "default",
        "bundle_jobs": args.bundle,
        "window_jobs": args.window,
        "version": args.model_version,
        "fallback": args.fallback,
        "late": args.late,
        "force": args.force,
    }
    async with Client(settings) as client:
        watching = asyncio.create_task(
            tell_when_stalled(
                lambda: progress.answered,
                lambda: submission.jobs_under_way,
                lambda: why_nothing_comes(settings, lane_queue(args.model, args.lane)),
                lambda text: progress.note(
                    f"inferq: {progress.answered:,} of {jobs(progress.answered + submission.jobs_under_way)} answered; "
                    f"waiting: {text}"
                ),
            )
        )
        try:
            answers = client.infer_many(args.model, submission.items(), **options)
            async with contextlib.aclosing(answers):
                await submission.take(answers)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@contextlib.contextmanager
def _errors_for_people(args: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except (InputError, InferqError) as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:
        # Whoever read the answers has left; the frame of the command line knows what that means.
        raise
    except OSError as error:
        # A disk that is full does not say which file it was.
        written = " or ".join(str(file) for file in (args.output, args.checkpoint) if file is not None)
        where = error.filename or written or "standard output"
        raise CommandError(f"{where}: {error.strerror or error}") from error


def _tell(tally: Tally, progress: Progress, args: argparse.Namespace, stop: Stop) -> None:
    if stop.status is not None:
        print(f"inferq: {_stopped(tally, args)}", file=sys.stderr)
    # Where nothing was answered an error message follows, and that is enough.
    if tally.ok or tally.failed or tally.skipped:
        print(_summary(tally, progress, args), file=sys.stderr)


def _stopped(tally: Tally, args: argparse.Namespace) -> str:
    answered = tally.ok + tally.failed
    text = f"stopped: {answered:,} answered, of {jobs(tally.sent)} sent"
    if args.checkpoint is not None:
        return f"{text}; the same command again goes on from there"
    return f"{text}; with --checkpoint FILE --output FILE.jsonl the same command again would go on from there"


def _summary(tally: Tally, progress: Progress, args: argparse.Namespace) -> str:
    parts = [f"{tally.ok:,} ok"]
    if tally.failed:
        codes = ", ".join(f"{code} {count:,}" for code, count in tally.codes.most_common())
        parts.append(f"{tally.failed:,} failed ({codes})")
    parts += [f"{count:,} {word}" for count, word in ((tally.late, "late"), (tally.fallback, "by fallback")) if count]
    if tally.skipped:
        parts.append(f"{tally.skipped:,} answered before")
    speed = f"{duration(progress.elapsed_s)} ({progress.jobs_per_s:,.0f}/s)"
    text = f"{jobs(tally.ok + tally.failed)} in {speed}: {', '.join(parts)}"
    if tally.unanswered and args.checkpoint is not None:
        text += (
            f"\n{tally.unanswered:,} have no answer: the same command again, with its --checkpoint, tries them again"
        )
    return text
