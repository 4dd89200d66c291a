"""`inferq result`: fetches the answer to a job that was sent before. Asks Redis only; no broker is needed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from inferq.answer_json import answer_line
from inferq.commands import CommandError, add_command, settings_of, speak_in_lines
from inferq.errors import AnswerTimeout, JobFailed, StoreUnavailable
from inferq.lookup import Lookup
from inferq.npz import NpzWriter
from inferq.records import InputError
from inferq.settings import ClientSettings

if TYPE_CHECKING:
    from inferq.answers import Answer
    from inferq.commands import Subparsers
    from inferq.settings import RedisSettings

__all__ = ["register"]

_DESCRIPTION = """\
Fetches the answer to a job from Redis, where it is kept for redis.result_ttl_s, or less once it was delivered.

Exit status: 0 answered, 1 answered with a failure, 2 Redis cannot be asked, 3 no answer yet."""
_EXAMPLES = """\
inferq result 2f1c0e2e-6d0f-4a53-9a53-0c2d8f0f6a11
inferq result flower-1 --wait 30 --json | jq .outputs
inferq result flower-1 --npz flower-1.npz"""
_EXIT_FAILED = 1
_EXIT_NO_ANSWER = 3
_SHOWN_VALUES = 8


def register(subparsers: Subparsers) -> None:
    """Add `inferq result`."""
    parser = add_command(
        subparsers,
        "result",
        summary="fetch the answer to a job that was sent before",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument("id", help="job id")
    parser.add_argument("--wait", type=_seconds, default=0.0, metavar="S", help="seconds to wait for it (default: 0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the whole answer as one JSON object")
    form.add_argument("--npz", type=Path, metavar="FILE", help="write the outputs to an .npz archive")
    parser.set_defaults(func=_run)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")


def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    speak_in_lines()
    try:
        answer = asyncio.run(_wait(settings.redis, args.id, args.wait))
    except AnswerTimeout as error:
        print(f"inferq: {error}", file=sys.stderr)
        return _EXIT_NO_ANSWER
    except StoreUnavailable as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(answer_line(answer).decode(), end="")
    elif answer.error is None:
        _deliver(args, answer)
    if answer.error is None:
        return 0
    if not args.json:
        print(f"inferq: {answer.error}", file=sys.stderr)
    return _EXIT_FAILED if isinstance(answer.error, JobFailed) else 2


async def _wait(settings: RedisSettings, job_id: str, timeout_s: float) -> Answer:
    async with Lookup(settings) as lookup:
        return await lookup.wait(job_id, timeout_s=timeout_s)


def _deliver(args: argparse.Namespace, answer: Answer) -> None:
    if args.npz is None:
        print("\n".join(_described(answer)))
        return
    try:
        with NpzWriter(args.npz) as writer:
            writer.add(0, answer.outputs)
    except (InputError, OSError) as error:
        raise CommandError(f"{args.npz}: {error}") from error


def _described(answer: Answer) -> list[str]:
    """A few lines for a person: who answered, how long it took, how each output begins."""
    result = answer.result
    lines = [f"job {answer.id}: ok{', late' if result.late else ''}{', by the fallback' if result.fallback else ''}"]
    if (by := result.served_by) is not None:
        lines.append(f"served by {by.model} version {by.version} on {by.worker} ({by.role}, {by.provider})")
    if (ms := result.timing_ms) is not None:
        lines.append(f"took {ms.total:.1f} ms: broker {ms.broker:.1f}, queue {ms.queue:.1f}, run {ms.run:.1f}")
    for name, array in answer.outputs.items():
        values = ", ".join(str(value) for value in array.ravel()[:_SHOWN_VALUES].tolist())
        more = ", ..." if array.size > _SHOWN_VALUES else ""
        lines.append(f"{name}: {array.dtype} {list(array.shape)} [{values}{more}]")
    return lines
