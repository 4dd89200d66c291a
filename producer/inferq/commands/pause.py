"""`inferq pause` and `inferq resume`: stop workers from taking jobs, for good or for a while, and let them again."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import sys
import time
from typing import TYPE_CHECKING

from inferq.amqp import BrokerUnreachable
from inferq.commands import CommandError, add_command, settings_of, speak_in_lines
from inferq.commands.durations import length_of_time, short_time
from inferq.counts import count_existing
from inferq.names import lane_problem, model_problem
from inferq.parking import printable
from inferq.pauses import Pause, Pauses
from inferq.settings import ClientSettings
from inferq_schemas import DEFAULT_LANES, FALLBACK_LANE, fallback_queue, lane_queue

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from inferq.commands import Subparsers

__all__ = ["register_pause", "register_resume"]

_PAUSE = """\
Stops all workers from taking jobs of a model, or of one of its lanes. Jobs stay in their queue; the broker still moves
those on whose time is up. What workers have in hand is finished. It holds for workers that start later too, and while
Redis is away, until `inferq resume`, or until --for is over.

MODEL pauses all its lanes and its CPU fallback, MODEL.LANE one of them (MODEL.fallback: the CPU fallback; GPU workers
divert nothing to it meanwhile). Without either, what is paused is listed.

Exit status: 0, or 1 if workers still take jobs some seconds later."""
_PAUSE_EXAMPLES = """\
inferq pause resnet50.bulk --for 10m --why "clearing the backlog of bert"
inferq pause resnet50
inferq pause --json"""
_RESUME = """\
Lifts pauses. MODEL lifts those of the model and of each of its lanes.

Exit status: 0, or 1 if nothing was paused by that name, or its whole model still is."""
_RESUME_EXAMPLES = """\
inferq resume resnet50.bulk
inferq resume --all"""
_OBEYED_WITHIN_S = 6.0
_ASK_EVERY_S = 0.3
_WHY_CHARS = 500


def register_pause(subparsers: Subparsers) -> None:
    """Add `inferq pause`."""
    parser = add_command(
        subparsers,
        "pause",
        summary="stop workers from taking jobs of a model or a lane; list what is paused",
        description=_PAUSE,
        examples=_PAUSE_EXAMPLES,
    )
    parser.add_argument("target", nargs="?", metavar="MODEL[.LANE]", help="what to pause; none = list")
    parser.add_argument("--for", dest="for_s", type=length_of_time, metavar="TIME", help="for so long: 90s, 10m, 2h")
    parser.add_argument("--why", default="", metavar="TEXT", help="for whoever finds it")
    parser.add_argument("--json", action="store_true", help="list as JSON, one object a line")
    parser.set_defaults(func=_pause)


def register_resume(subparsers: Subparsers) -> None:
    """Add `inferq resume`."""
    parser = add_command(
        subparsers, "resume", summary="let workers take them again", description=_RESUME, examples=_RESUME_EXAMPLES
    )
    parser.add_argument("target", nargs="?", metavar="MODEL[.LANE]", help="what to resume")
    parser.add_argument("--all", action="store_true", help="lift every pause")
    parser.set_defaults(func=_resume)


def _pause(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if args.target is None:
        if args.for_s is not None or args.why:
            raise CommandError("name what to pause: MODEL or MODEL.LANE")
        return _list(settings, json_lines=args.json)
    model, lane = _checked(args.target)
    queues = asyncio.run(_existing(settings, model, lane))
    now_ms = _now_ms()
    until_ms = None if args.for_s is None else now_ms + round(args.for_s * 1000)
    pause = Pause(args.target, _who(), args.why[:_WHY_CHARS], now_ms, until_ms)
    asyncio.run(_set(settings, pause))
    print(_line(pause, now_ms))
    return asyncio.run(_obeyed(settings, queues)) if queues else 0


def _resume(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if args.all == (args.target is not None):
        raise CommandError("name what to resume, MODEL or MODEL.LANE, or say --all")
    if args.target is not None:
        _checked(args.target)
    lifted, left = asyncio.run(_lift(settings, args.target))
    for pause in lifted:
        print(f"resumed {pause.target}")
    if left is not None:
        print(f"inferq: {args.target} stays paused with its whole model: {_line(left, _now_ms())}", file=sys.stderr)
    elif not lifted and not args.all:
        print(f"inferq: {args.target} is not paused; `inferq pause` lists what is", file=sys.stderr)
    return 0 if args.all or (lifted and left is None) else 1


def _list(settings: ClientSettings, *, json_lines: bool) -> int:
    async def read() -> list[Pause]:
        async with Pauses(settings.redis) as pauses:
            return sorted((await pauses.read()).values(), key=lambda pause: pause.target)

    found, now_ms = asyncio.run(read()), _now_ms()
    for pause in found:
        print(json.dumps(pause.to_map()) if json_lines else _line(pause, now_ms))
    if not found and not json_lines:
        print("nothing is paused")
    return 0


def _settings(args: argparse.Namespace) -> ClientSettings:
    speak_in_lines()
    return settings_of(args, ClientSettings)


def _checked(target: str) -> tuple[str, str | None]:
    model, dot, lane = target.partition(".")
    problem = model_problem(model)
    if problem is None and dot and lane != FALLBACK_LANE:
        problem = lane_problem(lane)
    if problem:
        raise CommandError(problem)
    return model, lane if dot else None


async def _existing(settings: ClientSettings, model: str, lane: str | None) -> list[str]:
    """The queues that a pause is for; empty where the broker cannot be asked, for then it holds all the same.

    Raises:
        CommandError: there is no such queue: the name is mistyped.
    """
    configured = settings.topology.models.get(model)
    names = (*(DEFAULT_LANES if configured is None else configured.lanes), FALLBACK_LANE) if lane is None else (lane,)
    queues = [fallback_queue(model) if name == FALLBACK_LANE else lane_queue(model, name) for name in names]
    try:
        found = await count_existing(settings.broker, queues)
    except BrokerUnreachable as error:
        print(f"inferq: the broker cannot be asked for {' or '.join(queues)}: {error}", file=sys.stderr)
        return []
    if not found:
        raise CommandError(f"the broker has no queue {' or '.join(queues)}: check the name; nothing was paused")
    return list(found)


async def _set(settings: ClientSettings, pause: Pause) -> None:
    async with Pauses(settings.redis) as pauses:
        await pauses.set(pause)


async def _lift(settings: ClientSettings, target: str | None) -> tuple[list[Pause], Pause | None]:
    """What was lifted, and the pause of the whole model that still holds for a lane."""
    async with Pauses(settings.redis) as pauses:
        held = await pauses.read()
        names = [name for name in held if target is None or name == target or name.startswith(f"{target}.")]
        await pauses.lift(names)
    whole = None if target is None or "." not in target else held.get(target.partition(".")[0])
    return [held[name] for name in names], whole


async def _obeyed(settings: ClientSettings, queues: Sequence[str]) -> int:
    """Wait until no worker consumes any more, and say so."""
    ends_s = time.monotonic() + _OBEYED_WITHIN_S
    while True:
        try:
            counts = await count_existing(settings.broker, queues)
        except BrokerUnreachable as error:
            print(f"inferq: whether workers obey is not known: {error}", file=sys.stderr)
            return 0
        taking = {queue: count.consumers for queue, count in counts.items() if count.consumers}
        if not taking:
            waiting = ", ".join(f"{queue} ({count.ready:,} messages wait)" for queue, count in counts.items())
            print(f"no worker takes jobs of {waiting}")
            return 0
        if time.monotonic() > ends_s:
            still = ", ".join(f"{queue} ({consumers} consumers)" for queue, consumers in taking.items())
            print(
                f"inferq: still consumed: {still}. Workers obey within two seconds where they reach the same Redis and "
                "have the same redis.prefix: look at `pauses` in their /status",
                file=sys.stderr,
            )
            return 1
        await asyncio.sleep(_ASK_EVERY_S)


def _line(pause: Pause, now_ms: int) -> str:
    since = short_time(max(0, now_ms - pause.since_unix_ms) / 1000)
    until = ""
    if pause.until_unix_ms is not None:
        until = f", ends in {short_time(max(0, pause.until_unix_ms - now_ms) / 1000)}"
    why = f": {printable(pause.why)}" if pause.why else ""
    return f"paused {printable(pause.target)} since {since} by {printable(pause.by)}{until}{why}"


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
