"""`inferq dead`: what failed and was parked: list it, look at it, send it back, drop it. Here is what a person types.

What a parked message is stands in `parking`, how it is sent back in `requeue`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING

from inferq.browse import MOST_MESSAGES, BrowseError
from inferq.commands import CommandError, add_command, settings_of, speak_in_lines
from inferq.commands.dead_text import as_json, details, summary, table
from inferq.commands.durations import length_of_time
from inferq.commands.stopping import Stop
from inferq.dead_work import Drop, Requeue, Work
from inferq.errors import StoreUnavailable
from inferq.parking import Selection, printable
from inferq.parking_queue import ParkingQueue
from inferq.requeue import NewDeadline
from inferq.settings import ClientSettings
from inferq_schemas import PARKING_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferq.commands import Subparsers
    from inferq.parking import Parked

__all__ = ["register"]

_DESCRIPTION = f"""\
Looks after {PARKING_QUEUE}: jobs that failed for other reasons than their caller's fault (they have been answered) and
what the broker could not deliver. It is bounded: when it is full, the oldest messages go.

All actions take the same filters, which must all agree. Looking takes nothing out and changes no order; while one of
these commands holds the messages, another one is refused. Ended at any moment, also by force, they lose nothing: what
was not done is in the queue still. A job that was just being sent back may then be there twice, parked and in its lane;
that is harmless, for its id has one outcome."""
_EXAMPLES = """\
inferq dead list --model resnet50 --younger 1h
inferq dead list --json | jq -r .reason | sort | uniq -c
inferq dead show 3f0c2b9e
inferq dead requeue --reason overloaded --older 10m --deadline-s 60 --rate 20 --dry-run
inferq dead drop --unreadable"""
_EXIT_LEFT = 1
_SHOWN_LINES = 20


def register(subparsers: Subparsers) -> None:
    """Add `inferq dead` and its actions."""
    parser = add_command(
        subparsers,
        "dead",
        summary="list, show, send back or drop jobs that failed and were parked",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    _action(actions, "list", _list, "list parked messages", "Lists parked messages, the oldest first. Exit status 0.")
    _action(
        actions,
        "show",
        _show,
        "show all that is known about some of them",
        "Shows headers, deadlines and inputs of parked messages, and the first bytes of those that cannot be read. "
        "Exit status 0, or 1 if there is none.",
    )
    requeue = _action(
        actions,
        "requeue",
        _requeue,
        "send them back to their lanes, to run again",
        "Deletes each job's stored outcome, so that it runs again, publishes it to its lane and, once that is "
        "confirmed, takes it out of parking. Its id, its correlation id and its reply queue stay; the broker's headers "
        "go, and its attempts count from 1. What is parked after the command began is left alone. Exit status 0 if all "
        "that was meant went, 1 if some stayed.",
    )
    _rate(requeue, "jobs' messages a second (default: 50)", default=50.0)
    deadline = requeue.add_mutually_exclusive_group()
    deadline.add_argument(
        "--deadline-s", type=length_of_time, metavar="N", help="a new deadline, so long from when each is sent"
    )
    deadline.add_argument("--no-deadline", action="store_true", help="without deadline; not for the interactive lane")
    drop = _action(
        actions,
        "drop",
        _drop,
        "delete them for good",
        "Deletes parked messages; stored outcomes stay. Asks before it does, unless --yes. Exit status 0 if all that "
        "was meant is deleted, 1 if not.",
    )
    _rate(drop, "messages a second (default: no limit)", default=math.inf)
    drop.add_argument("--yes", action="store_true", help="do not ask")


def _action(
    actions: Subparsers, name: str, func: Callable[[argparse.Namespace], int], help_text: str, description: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help_text, description=description, allow_abbrev=False)
    parser.add_argument(
        "which", nargs="*", metavar="WHICH", help="job ids, or keys as `list` shows them (8 digits or more)"
    )
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="only of this model; repeatable")
    parser.add_argument("--reason", action="append", default=[], metavar="CODE", help="only with this; repeatable")
    parser.add_argument(
        "--older", type=length_of_time, metavar="TIME", help="parked longer ago than that: 90s, 10m, 2h"
    )
    parser.add_argument("--younger", type=length_of_time, metavar="TIME", help="parked since then")
    parser.add_argument("--unreadable", action="store_true", help="only what holds no job that can be read")
    parser.add_argument("--limit", type=_at_least_one, metavar="N", help="at most so many, the oldest first")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(func=func)
    return parser


def _rate(parser: argparse.ArgumentParser, text: str, *, default: float) -> None:
    parser.add_argument("--rate", type=_rate_per_s, default=default, metavar="N", help=text)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--all", action="store_true", help="everything that is parked, where no filter is given")


def _at_least_one(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")


def _rate_per_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _selection(args: argparse.Namespace) -> Selection:
    return Selection(
        models=frozenset(args.model),
        reasons=frozenset(args.reason),
        names=frozenset(args.which),
        older_s=args.older,
        younger_s=args.younger,
        unreadable=args.unreadable,
    )


def _meant(args: argparse.Namespace, settings: ClientSettings) -> tuple[list[Parked], int]:
    """The messages that are meant, and how many are parked."""

    async def scan() -> list[Parked]:
        async with ParkingQueue(settings.broker) as queue:
            return await queue.scan()

    with _errors_for_people():
        found = asyncio.run(scan())
    if len(found) == MOST_MESSAGES:
        print(
            f"inferq: only the first {MOST_MESSAGES:,} messages are looked at, perhaps there are more", file=sys.stderr
        )
    now_ms, selection = _now_ms(), _selection(args)
    return [message for message in found if selection.takes(message, now_ms)][: args.limit], len(found)


def _list(args: argparse.Namespace) -> int:
    found, parked = _meant(args, _settings(args))
    for line in [as_json(message, _now_ms()) for message in found] if args.json else table(found, _now_ms()):
        print(line)
    if not args.json:
        print(f"{len(found):,} of {parked:,} parked messages", file=sys.stderr)
    return 0


def _show(args: argparse.Namespace) -> int:
    settings = _settings(args)
    found, parked = _meant(args, settings)

    async def show() -> None:
        async with (
            ParkingQueue(settings.broker) as queue,
            contextlib.aclosing(queue.each(found, count=parked)) as messages,
        ):
            async for held, message in messages:
                print(details(message, held.message, _now_ms(), json_line=args.json))

    if not found:
        print("inferq: no such message is parked", file=sys.stderr)
        return _EXIT_LEFT
    with _errors_for_people():
        asyncio.run(show())
    return 0


def _requeue(args: argparse.Namespace) -> int:
    settings = _settings(args)
    deadline = NewDeadline("none") if args.no_deadline else NewDeadline()
    if args.deadline_s is not None:
        deadline = NewDeadline("new", args.deadline_s)
    return _work(args, settings, Requeue(settings, deadline))


def _drop(args: argparse.Namespace) -> int:
    if not (args.yes or args.dry_run or sys.stdin.isatty()):
        raise CommandError("drop asks before it deletes, and nobody is there to answer: say --yes")
    return _work(args, _settings(args), Drop())


def _settings(args: argparse.Namespace) -> ClientSettings:
    speak_in_lines()
    return settings_of(args, ClientSettings)


def _work(args: argparse.Namespace, settings: ClientSettings, action: Requeue | Drop) -> int:
    if _selection(args).everything and not args.all:
        raise CommandError("name what is meant with filters or ids, or say --all")
    found, parked = _meant(args, settings)
    work = Work(action, rate_per_s=args.rate, tell=_teller(args))
    work.meant(found, parked, _now_ms())
    stop = Stop(lambda: None)
    agreed = args.dry_run or not found or not isinstance(action, Drop) or args.yes or _agreed(found)
    try:
        if args.dry_run:
            work.tell_what_would_be_done()
        elif agreed:
            with _errors_for_people():
                stop.run(_do(work, settings))
    finally:
        print(summary(work, dry_run=args.dry_run), file=sys.stderr)
    left = bool(work.stays) if args.dry_run else work.left
    return stop.status or (_EXIT_LEFT if left else 0)


async def _do(work: Work, settings: ClientSettings) -> None:
    async with ParkingQueue(settings.broker) as queue:
        await work.do(queue)


def _teller(args: argparse.Namespace) -> Callable[[Parked, str, str], None]:
    """Prints what became of each message."""

    def tell(message: Parked, what: str, why: str) -> None:
        if args.json:
            print(as_json(message, _now_ms(), what=what, why=why))
        else:
            jobs = ", ".join(message.job_ids[:3]) or "(no job id)"
            print(printable(f"{message.key} {jobs}: {what}{': ' if why else ''}{why}"))

    return tell


def _agreed(found: list[Parked]) -> bool:
    lines = table(found, _now_ms())
    print("\n".join(lines[: _SHOWN_LINES + 1]), file=sys.stderr)
    if len(found) > _SHOWN_LINES:
        print(f"... and {len(found) - _SHOWN_LINES:,} more", file=sys.stderr)
    print(f"Delete {len(found):,} messages for good? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


@contextlib.contextmanager
def _errors_for_people() -> Iterator[None]:
    try:
        yield
    except (BrowseError, StoreUnavailable) as error:
        raise CommandError(str(error)) from error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
